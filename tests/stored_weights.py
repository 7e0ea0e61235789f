"""Weights in every stored format, with gguf's own decoder as the oracle of their values."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from in_memory import RawTensor

FLOATS = ("f32", "f16", "bf16")
QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
FORMATS = (*FLOATS, *QUANTISED)
NO_KERNEL = ("q2_k", "q3_k")

# Where a block keeps its float16 scales; the bytes before its integers, where it has minimums.
_SCALES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "q2_k": (80, 82),
    "q3_k": (108,),
}
_SUB_SCALES = {"q4_k": slice(4, 16), "q5_k": slice(4, 16), "q6_k": slice(192, 208)}
_HEADERS = {"q4_1": 4, "q5_1": 4, "q4_k": 16, "q5_k": 16}


def block_inputs(format: str) -> int:
    """A row's length is a multiple of this."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[format.upper()]][0])


def encode(format: str, values_NK: torch.Tensor) -> RawTensor:
    """``values_NK`` rounded by gguf to a format that it can write (all but the K-quants)."""
    raw = quantize(values_NK.numpy(), GGMLQuantizationType[format.upper()])
    return RawTensor(np.ascontiguousarray(raw).view(np.uint8), format)


def random_weight(format: str, num_outputs: int, num_inputs: int, seed: int = 0) -> RawTensor:
    """Floats of very different sizes; in quantised formats any bits at all, but for the float16
    scales, of both signs, some of which are subnormal or zero."""
    generator = np.random.default_rng(seed)
    if format in FLOATS:
        values = generator.normal(size=(num_outputs, num_inputs))
        values *= 10.0 ** generator.integers(-7, 3, size=values.shape)
        return encode(format, torch.from_numpy(values.astype(np.float32)))
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[format.upper()]]
    blocks = generator.integers(0, 256, (num_outputs, num_inputs // inputs, size), np.uint8)
    for at in _SCALES[format]:
        scales = generator.normal(size=blocks.shape[:2]) * 0.05
        scales[generator.random(scales.shape) < 0.05] *= 1e-4
        scales[generator.random(scales.shape) < 0.05] = 0
        blocks[..., at : at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    return RawTensor(blocks.reshape(num_outputs, -1), format)


def filled_weight(
    format: str, num_outputs: int, num_inputs: int, fill: int, sub_scale: int = 0xFF
) -> RawTensor:
    """Every byte of the integers is ``fill``; the float16 scales (and minimums) are 1, and the
    bytes of the scales within a superblock ``sub_scale``."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[format.upper()]]
    blocks = np.full((num_outputs, num_inputs // inputs, size), fill, np.uint8)
    blocks[..., _SUB_SCALES.get(format, slice(0))] = sub_scale
    for at in _SCALES[format]:
        blocks[..., at : at + 2] = np.array([1.0], "<f2").view(np.uint8)
    return RawTensor(blocks.reshape(num_outputs, -1), format)


def identity_weight(size: int) -> RawTensor:
    """[size, size] in q8_0, with every scale 1."""
    blocks = np.zeros((size, size // 32, 34), np.uint8)
    blocks[..., :2] = np.array([1.0], "<f2").view(np.uint8)
    rows = np.arange(size)
    blocks[rows, rows // 32, 2 + rows % 32] = 1
    return RawTensor(blocks.reshape(size, -1), "q8_0")


def magnitudes(weight: RawTensor) -> torch.Tensor:
    """|scale * q| + |minimum| of each value, float64 [N, K]: what roundings are relative to."""
    values = weight.read().double()
    header = _HEADERS.get(weight.format)
    if header is None:
        return values.abs()
    size = GGML_QUANT_SIZES[GGMLQuantizationType[weight.format.upper()]][1]
    blocks = weight.read_raw().reshape(weight.shape[0], -1, size).copy()
    blocks[..., header:] = 0
    minimums = RawTensor(blocks.reshape(weight.shape[0], -1), weight.format).read().double()
    return (values - minimums).abs() + minimums.abs()
