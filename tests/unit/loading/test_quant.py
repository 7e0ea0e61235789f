"""Decoding against the gguf package (GGML's formats) and torch (floats), bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from eyas.loading import quant

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    """Random bytes are valid blocks; scales that are not finite are allowed here."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(7).integers(0, 256, (rows, blocks * size), dtype=np.uint8)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (40, 7), (129, 2)])
def test_blocks_decode_to_the_bits_of_the_reference(name: str, rows: int, blocks: int) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = random_blocks(kind, rows, blocks)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).reshape(-1)
    actual = quant.decode(raw, name.lower()).numpy()
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("name", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_floats_keep_their_values(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = values.view(torch.uint8).numpy()
    assert torch.equal(quant.decode(raw, name), values.float().reshape(-1))


def test_sizes_match_the_format() -> None:
    for name in BLOCK_TYPES:
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert quant.block_size(name.lower()) == values
        assert quant.size_in_bytes((3, 2 * values), name.lower()) == 6 * size
    assert quant.size_in_bytes((), "f32") == 4


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole q4_0 blocks of 32"):
        quant.size_in_bytes((4, 48), "q4_0")
