"""quantise_rows against gguf.quants, the reference for the formats, byte for byte."""

import gguf
import numpy as np
import pytest
import torch

from eyas import _core

KINDS = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_1": gguf.GGMLQuantizationType.Q4_1}


def context(num_threads: int = 2) -> _core.Context:
    return _core.Context(_core.instruction_sets()[0], num_threads)


def kernel(rows: np.ndarray, format: str, num_threads: int = 2) -> np.ndarray:
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty((len(rows), _core.row_bytes(format, rows.shape[1])), np.uint8)
    assert _core.quantise_rows(
        context(num_threads), format, rows.ctypes.data, *rows.shape, out.ctypes.data
    )
    return out


def reference(rows: np.ndarray, format: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(np.ascontiguousarray(rows, np.float32), KINDS[format])


def special_rows() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(3).standard_normal((64, 96)).astype(np.float32)
    steps = np.arange(96, dtype=np.float32)
    return {
        "random": noise,
        "zero": np.zeros((3, 64)),
        "minus zero": np.full((3, 64), -0.0),
        "constant": np.full((3, 64), 0.3),
        "negative constant": np.full((3, 64), -7.25),
        "negative": -np.abs(noise),
        "positive": np.abs(noise) + 5,
        "huge": noise * 1e4,
        "mixed scales": noise * 10.0 ** np.arange(-30, 34).clip(None, 3)[:, None],
        "scale is subnormal in float16": noise * 1e-6,
        "scale is 0 in float16": noise * 1e-9,
        "subnormal": noise * 1e-39,
        "least": np.where(noise > 0, 1.4e-45, 0),
        "one outlier": np.where(steps == 40, 1000.0, noise),
        "ties of q8_0": np.stack([np.where(steps % 32 == 0, 127, steps % 32 - 15.5)] * 2),
        "ties of q4_1": np.stack([np.where(steps % 32 == 0, 15, steps % 15 + 0.5)] * 2) - 4,
        "bfloat16": torch.from_numpy(noise).bfloat16().float().numpy(),
    }


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("case", special_rows())
def test_blocks_are_those_of_the_gguf_package(case: str, format: str) -> None:
    rows = special_rows()[case]
    assert np.array_equal(kernel(rows, format), reference(rows, format))


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_blocks_do_not_depend_on_how_rows_are_cut(format: str, num_threads: int) -> None:
    random = np.random.default_rng(4)
    for num_rows in (1, 2, 3, 7, 129):
        rows = random.standard_normal((num_rows, 160)) * np.exp(random.normal(size=(num_rows, 1)))
        assert np.array_equal(kernel(rows, format, num_threads), reference(rows, format))
    out = np.empty((0, _core.row_bytes(format, 32)), np.uint8)
    assert _core.quantise_rows(context(num_threads), format, 0, 0, 32, out.ctypes.data)


def test_what_can_not_be_quantised_is_refused() -> None:
    for format, num_inputs in (("q4_0", 32), ("f32", 32), ("q8_0", 33)):
        with pytest.raises(ValueError, match=f"{num_inputs} floats can't be quantised to {format}"):
            _core.quantise_rows(context(), format, 0, 0, num_inputs, 0)
