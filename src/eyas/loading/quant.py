"""Stored encodings: sizes, and decoding to float32 at exactly the values stored.

Formats are named in lower case: "f32", "f16", "bf16", and GGML's block types ("q4_1", "q6_k", ...),
whose layout and values are those of ``gguf.quants`` (the reference for the format).
"""

import math

import gguf
import numpy as np
import numpy.typing as npt
import torch

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BLOCK_TYPES = {
    name.lower(): gguf.GGMLQuantizationType[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
}
FORMATS = (*_FLOATS, *_BLOCK_TYPES)

# Values that one call of gguf's decoder should see in a row: it walks its input in groups of 16
# rows: many short rows are many calls, long ones miss the cache.
_VALUES_PER_ROW = 2048


def block_size(format: str) -> int:
    """How many consecutive values share a block (1 for floats)."""
    return 1 if format in _FLOATS else int(gguf.GGML_QUANT_SIZES[_BLOCK_TYPES[format]][0])


def size_in_bytes(shape: tuple[int, ...], format: str) -> int:
    """Bytes of a tensor of ``shape``. ValueError if its rows aren't whole blocks."""
    count = math.prod(shape)
    if format in _FLOATS:
        return count * _FLOATS[format].itemsize
    values, size = gguf.GGML_QUANT_SIZES[_BLOCK_TYPES[format]]
    if not shape or shape[-1] % values:
        raise ValueError(f"shape {shape} is not in whole {format} blocks of {values} values")
    return count // int(values) * int(size)


def decode(raw: npt.NDArray[np.uint8], format: str) -> torch.Tensor:
    """The values of ``raw`` (uint8 [rows, bytes per row]) as a flat float32 tensor."""
    if format in _FLOATS:
        owned = torch.from_numpy(np.array(raw, order="C").reshape(-1))
        return owned.view(_FLOATS[format]).to(torch.float32)
    kind = _BLOCK_TYPES[format]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(raw).reshape(-1, int(size))
    # Blocks are independent, so any way of putting them in rows decodes to the same values.
    per_row = max(1, _VALUES_PER_ROW // int(values))
    whole = len(blocks) // per_row * per_row
    out = np.empty((len(blocks), int(values)), dtype=np.float32)
    with np.errstate(all="ignore"):  # damaged scales give inf or NaN; the caller checks
        for start, stop in ((0, whole), (whole, len(blocks))):
            if stop > start:
                rows = blocks[start:stop].reshape(-1, size * (per_row if stop == whole else 1))
                out[start:stop] = gguf.quants.dequantize(rows, kind).reshape(-1, int(values))
    return torch.from_numpy(out.reshape(-1))
