"""rms_norm, rope and silu_mul, and the two numpy facts that they rest on."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bits import same_bits, threads
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.ops.base import Ops
from eyas.ops.reference import ReferenceOps
from eyas.ops.torch_cpu import TorchOps

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
ROWS = 70
OPS = [ReferenceOps(), TorchOps()]
SIZES = [2, 6, 8, 24, 33 * 2, 576, 1536]

# Each takes rows x [T, size] and returns rows; a row's other inputs depend on its place in ROWS.
RowFunction = Callable[[Ops, torch.Tensor, torch.Tensor], torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def at_offset(x: torch.Tensor, offset: int) -> torch.Tensor:
    return torch.cat([torch.zeros(offset), x.reshape(-1)])[offset:].view(x.shape)


def rms_norm(ops: Ops, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.rms_norm(x, random(x.shape[1], seed=3), 1e-5, out)
    return out


def angles(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = random(ROWS, size, seed=4)[rows]
    return angle.cos(), angle.sin()


def rope(ops: Ops, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out = x.clone().view(len(x), -1, x.shape[1])
    ops.rope(out, *angles(rows, x.shape[1]))
    return out.view(x.shape)


def rope_heads(ops: Ops, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Three heads, the row's values in each of them."""
    out = x[:, None].repeat(1, 3, 1)
    ops.rope(out, *angles(rows, x.shape[1]))
    return out.reshape(len(x), -1)


def silu_mul(ops: Ops, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), x.shape[1] // 2)
    ops.silu_mul(x, out)
    return out


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("function", [rms_norm, rope, rope_heads, silu_mul])
@settings(max_examples=25)
@given(
    size=st.sampled_from(SIZES),
    rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS),
    offset=st.integers(0, 17),
    count=st.sampled_from([1, 2]),
)
def test_a_row_ignores_its_neighbours(
    ops: Ops, function: RowFunction, size: int, rows: list[int], offset: int, count: int
) -> None:
    x = random(ROWS, size, seed=2) * 5
    everything = torch.arange(ROWS)
    expected = function(ops, x, everything)
    with threads(count):
        actual = function(ops, at_offset(x[rows], offset), everything[rows])
    assert same_bits(actual, expected[rows])

    poisoned = torch.full_like(x, float("nan"))
    poisoned[rows] = x[rows]
    assert same_bits(function(ops, poisoned, everything)[rows], expected[rows])


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("size", SIZES)
def test_values(ops: Ops, size: int) -> None:
    x = random(ROWS, size, seed=2) * 5
    x[0] *= 40  # silu's exp overflows
    wide = x.double()

    scale = (wide.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
    exact = wide * scale * random(size, seed=3).double()
    # A sum of squares is off by at most size + 1 roundings, its root by half of that.
    assert ((rms_norm(ops, x, x) - exact).abs() <= (size / 2 + 6) * EPS * exact.abs() + TINY).all()

    rows = torch.arange(ROWS)
    cos, sin = (table.double() for table in angles(rows, size))
    turned = torch.cat([-wide[:, size // 2 :], wide[:, : size // 2]], dim=1)
    exact = wide * cos + turned * sin
    bound = 2 * EPS * ((wide * cos).abs() + (turned * sin).abs())
    assert ((rope(ops, x, rows) - exact).abs() <= bound).all()

    gate, up = wide[:, : size // 2], wide[:, size // 2 :]
    exact = gate / (1 + (-gate).exp()) * up
    # exp: 4 units in the last place; four more roundings. Below -88.7 exp(-gate) overflows, and
    # silu comes out as 0 instead of gate * exp(gate).
    bound = 8 * EPS * exact.abs() + 88.8 / torch.finfo(torch.float32).max * up.abs() + TINY
    assert ((silu_mul(ops, x, x) - exact).abs() <= bound).all()


def test_numpy_exp_depends_on_the_value_alone() -> None:
    values = (random(6000).numpy() * 20).clip(-104, 80)
    values[::97], values[5::131] = -np.inf, np.finfo(np.float32).min
    expected = np.exp(values)
    assert np.exp(np.float32(0)) == 1
    for start in range(34):
        for length in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1000, 4097):
            part = slice(start, start + length)
            shifted = np.empty(length + start, np.float32)[start:]
            shifted[:] = values[part]
            np.testing.assert_array_equal(np.exp(shifted), expected[part])
            np.exp(shifted, out=shifted)
            np.testing.assert_array_equal(shifted, expected[part])
    for columns in (3, 8, 21, 64):
        table = values[: columns * 60].reshape(60, columns)
        wanted = expected[: columns * 60].reshape(60, columns)
        for width in range(1, columns + 1, 5):
            np.testing.assert_array_equal(np.exp(table[::2, :width]), wanted[::2, :width])
        np.testing.assert_array_equal(np.exp(table.T), wanted.T)
        np.testing.assert_array_equal(np.exp(table[:, columns // 2]), wanted[:, columns // 2])


@pytest.mark.parametrize("size", [*range(1, 20), 33, 64, 127, 128, 129, 576, 1000, 4096, 8200])
def test_numpy_sums_depend_on_the_row_alone(size: int) -> None:
    rows = random(60, size).numpy()
    expected = np.array([np.add.reduce(row) for row in rows])
    for count in (1, 2, 3, 7, 33, 60):
        for offset in (0, 1, 3, 8):
            part = np.empty(count * size + offset, np.float32)[offset:].reshape(count, size)
            part[:] = rows[:count]
            np.testing.assert_array_equal(np.add.reduce(part, axis=-1), expected[:count])
    stacked = rows.reshape(3, 4, 5, size)
    wanted = expected.reshape(3, 4, 5)
    for count in range(1, 6):  # as attention sums the real rows of its blocks
        sums = np.add.reduce(stacked[:, :, :count], axis=-1)
        np.testing.assert_array_equal(sums, wanted[:, :, :count])
