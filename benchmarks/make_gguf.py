"""Writes the GGUF files that the benchmarks run on, where they are not there yet.

``demo``: the demo model's weights, dequantised and encoded anew, with its metadata and tokenizer.
``llama-3.2-1b``: random weights in the shapes of Llama-3.2-1B, with the demo's tokenizer, padded.
Matrices get the format asked for. The embedding, which is also the output head, is Q8_0 beside
matrices of fewer bits, as in the demo's own file; norms are float32.

    python benchmarks/make_gguf.py demo                          # every format there is for it
    python benchmarks/make_gguf.py llama-3.2-1b --formats Q4_1 Q8_0 --output DIR
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Format

from eyas.loading.checkpoint import open_checkpoint
from eyas.loading.gguf import GGUFFile

DEFAULT_FOLDER = Path("~/.cache/eyas/bench-models").expanduser()
EMBEDDING = "token_embd.weight"
# What the gguf package can encode. It has no encoder for K-quants, and the demo's rows of 576
# values are not whole blocks of 256.
DEMO_FORMATS = ("F32", "BF16", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_0")
RANDOM_FORMATS = (*DEMO_FORMATS, "Q4_1", "Q4_K", "Q6_K")
DEFAULT_FORMATS = {
    "demo": ("F32", "BF16", "F16", "Q8_0", "Q4_0"),
    "llama-3.2-1b": ("Q8_0", "Q4_1", "Q4_0"),
}

_LLAMA_1B = {
    "block_count": 16,
    "context_length": 131072,
    "embedding_length": 2048,
    "feed_forward_length": 8192,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "rope.dimension_count": 64,
    "vocab_size": 128256,
}
_LLAMA_1B_FLOATS = {"rope.freq_base": 500000.0, "attention.layer_norm_rms_epsilon": 1e-5}
_FILE_TYPES = {
    Format.F32: gguf.LlamaFileType.ALL_F32,
    Format.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Format.F16: gguf.LlamaFileType.MOSTLY_F16,
    Format.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Format.Q6_K: gguf.LlamaFileType.MOSTLY_Q6_K,
    Format.Q5_1: gguf.LlamaFileType.MOSTLY_Q5_1,
    Format.Q5_0: gguf.LlamaFileType.MOSTLY_Q5_0,
    Format.Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_S,
    Format.Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1,
    Format.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}
_UNUSED_TOKEN = 5  # of tokenizer.ggml.token_type
_SCALE = 0.02  # standard deviation of random weights


@dataclass(frozen=True, slots=True)
class Tensor:
    """``shape`` is in PyTorch order."""

    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return tuple(gguf.quant_shape_to_byte_shape(self.shape, self.format))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("model", choices=tuple(DEFAULT_FORMATS))
    parser.add_argument("--formats", nargs="+", choices=RANDOM_FORMATS, metavar="FORMAT")
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDER, metavar="DIR")
    options = parser.parse_args()
    formats = options.formats or DEFAULT_FORMATS[options.model]
    try:
        for name in formats:
            if options.model == "demo" and name not in DEMO_FORMATS:
                raise ValueError(f"the demo can't be encoded as {name}: {', '.join(DEMO_FORMATS)}")
            path = options.output / f"{options.model}-{name}.gguf"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write = write_demo if options.model == "demo" else write_random
                write(path, Format[name])
            print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB", flush=True)
    except ValueError as error:
        sys.exit(f"make_gguf: {error}")


def write_demo(path: Path, format: Format) -> None:
    """ValueError if the demo model is not installed."""
    demo = _demo()
    reader = gguf.GGUFReader(demo.path)
    tensors = [
        Tensor(t.name, tuple(map(int, t.shape[::-1])), _format(t.name, len(t.shape), format))
        for t in reader.tensors
    ]

    def data() -> Iterator[npt.NDArray[Any]]:
        for stored, tensor in zip(reader.tensors, tensors, strict=True):
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
            yield gguf.quants.quantize(values.reshape(tensor.shape), tensor.format)

    _write(path, _metadata(demo.path), {}, tensors, data(), format)


def write_random(path: Path, format: Format) -> None:
    """ValueError if the demo model, whose tokenizer it takes, is not installed."""
    demo = _demo()
    shapes = _LLAMA_1B
    metadata = {
        name: value
        for name, value in _metadata(demo.path).items()
        if name.startswith("tokenizer.ggml.")
    }
    kinds = gguf.GGUFValueType
    metadata |= {f"llama.{name}": (value, kinds.UINT32, None) for name, value in shapes.items()}
    for name, number in _LLAMA_1B_FLOATS.items():
        metadata[f"llama.{name}"] = (number, kinds.FLOAT32, None)
    metadata["general.name"] = ("Random weights, Llama-3.2-1B shapes", kinds.STRING, None)
    missing = shapes["vocab_size"] - len(demo.strings("tokenizer.ggml.tokens"))
    padding: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"<|unused_{i}|>" for i in range(missing)],
        "tokenizer.ggml.token_type": [_UNUSED_TOKEN] * missing,
    }
    tensors = _llama_tensors(format)
    generator = np.random.default_rng(0)
    data = (random_tensor(tensor, generator) for tensor in tensors)
    _write(path, metadata, padding, tensors, data, format)


def _llama_tensors(format: Format) -> list[Tensor]:
    hidden, inner = _LLAMA_1B["embedding_length"], _LLAMA_1B["feed_forward_length"]
    head_dim = _LLAMA_1B["rope.dimension_count"]
    queries = _LLAMA_1B["attention.head_count"] * head_dim
    keys = _LLAMA_1B["attention.head_count_kv"] * head_dim
    block = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (_LLAMA_1B["vocab_size"], hidden)}
    for layer in range(_LLAMA_1B["block_count"]):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (hidden,)
    return [Tensor(n, shape, _format(n, len(shape), format)) for n, shape in shapes.items()]


def random_tensor(tensor: Tensor, generator: np.random.Generator) -> npt.NDArray[Any]:
    """The stored form: floats, or uint8 [rows, bytes per row]. A norm is ones. Blocks are random
    bytes with scales that make the weights' standard deviation about 0.02 and their mean 0."""
    if len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    if tensor.format not in _BLOCK_SCALES:
        values = generator.standard_normal(tensor.shape, np.float32)
        values *= _SCALE
        return gguf.quants.quantize(values, tensor.format)
    raw = np.frombuffer(generator.bytes(int(np.prod(tensor.byte_shape))), np.uint8)
    blocks = raw.copy().reshape(-1, int(gguf.GGML_QUANT_SIZES[tensor.format][1]))
    spread = generator.uniform(0.7, 1.3, (len(blocks), 1)).astype(np.float32)
    for start, scale in _BLOCK_SCALES[tensor.format].items():
        blocks[:, start : start + 2] = (spread * scale * _SCALE).astype("<f2").view(np.uint8)
    if tensor.format == Format.Q4_K:
        blocks[:, 4:12] = 0xA0  # eight scales and eight minima of six bits, all 32
        blocks[:, 12:16] = 0
    elif tensor.format == Format.Q6_K:
        blocks[:, 192:208] = 32  # sixteen scales of eight bits
    return blocks.reshape(tensor.byte_shape)


# Where a block's half floats lie, and what they are for weights of standard deviation 1: uniform
# integers of b bits have 2**b / sqrt(12), and a minimum shifts their mean to 0.
_STD_4, _STD_5, _STD_6, _STD_8 = ((2**bits) / 12**0.5 for bits in (4, 5, 6, 8))
_BLOCK_SCALES: dict[Format, dict[int, float]] = {
    Format.Q8_0: {0: 1 / _STD_8},
    Format.Q4_0: {0: 1 / _STD_4},
    Format.Q4_1: {0: 1 / _STD_4, 2: -7.5 / _STD_4},
    Format.Q5_0: {0: 1 / _STD_5},
    Format.Q5_1: {0: 1 / _STD_5, 2: -15.5 / _STD_5},
    Format.Q4_K: {0: 1 / _STD_4 / 32, 2: 7.5 / _STD_4 / 32},
    Format.Q6_K: {208: 1 / _STD_6 / 32},
}


def _demo() -> GGUFFile:
    source = open_checkpoint("demo").source
    assert isinstance(source, GGUFFile)
    return source


def _format(name: str, num_dims: int, format: Format) -> Format:
    """The format of one tensor in a file of ``format``."""
    if num_dims == 1:
        return Format.F32
    if name == EMBEDDING and format not in (Format.F32, Format.F16, Format.BF16):
        return Format.Q8_0
    return format


def _metadata(path: Path) -> dict[str, tuple[Any, Any, Any]]:
    """Value, type and, of arrays, the element type of each key that a file's author chose."""
    return {
        field.name: (
            field.contents(),
            field.types[0],
            field.types[-1] if len(field.types) > 1 else None,
        )
        for field in gguf.GGUFReader(path).fields.values()
        if not field.name.startswith("GGUF.")
        and field.name not in ("general.architecture", "general.file_type")
    }


def _write(
    path: Path,
    metadata: dict[str, tuple[Any, Any, Any]],
    padding: dict[str, list[Any]],
    tensors: list[Tensor],
    data: Iterator[npt.NDArray[Any]],
    format: Format,
) -> None:
    """One tensor at a time, into a file that gets its name when it is complete. ``padding``
    lengthens arrays of the metadata."""
    unfinished = path.with_name(path.name + ".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    for name, (value, kind, element_kind) in metadata.items():
        longer = value + padding[name] if name in padding else value
        writer.add_key_value(name, longer, kind, element_kind)
    writer.add_file_type(_FILE_TYPES[format])
    for tensor in tensors:
        size = int(np.prod(tensor.byte_shape))
        writer.add_tensor_info(
            tensor.name, tensor.byte_shape, np.dtype(np.uint8), size, tensor.format
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for stored in data:
        writer.write_tensor_data(stored)
    writer.close()
    unfinished.rename(path)


if __name__ == "__main__":
    main()
