"""rms_norm, rope, silu_mul, add, scale_rows, split and concat: row by row."""

from collections.abc import Callable

import pytest
import torch
from bits import at_offset, random, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, FLOAT, REFERENCE, THREADS, Family, compiled

from eyas.ops.base import Ops

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
ROWS = 70
SIZES = [2, 6, 8, 24, 33 * 2, 192, 576, 1536]
NAMES = {"ids": lambda value: getattr(value, "name", getattr(value, "__name__", None))}

# Each takes rows x [T, size] and their positions [T], and returns rows.
RowFunction = Callable[[Ops, torch.Tensor, torch.Tensor], torch.Tensor]


def frequencies(head_dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)


def norm(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    weight = random(x.shape[1], seed=3)
    return compiled(ops, lambda x: ops.rms_norm(x, weight, 1e-5))(x)


def norm_of_heads(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    weight = random(x.shape[1] // 2, seed=3)
    return compiled(ops, lambda x: ops.rms_norm(x, weight, 1e-5))(x)


def rope(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    inv_freq = frequencies(x.shape[1])
    return compiled(ops, lambda x, at: ops.rope(x, ops.angles(inv_freq, at)))(x, positions)


def rope_of_heads(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Three heads, the row's values in each of them."""
    inv_freq = frequencies(x.shape[1])
    turn = compiled(ops, lambda x, at: ops.rope(x, ops.angles(inv_freq, at)))
    return turn(x.repeat(1, 3), positions)


def rope_interleaved(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    inv_freq = frequencies(x.shape[1])
    turn = compiled(ops, lambda x, at: ops.rope(x, ops.angles(inv_freq, at), interleaved=True))
    return turn(x, positions)


def silu_mul(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return compiled(ops, ops.silu_mul)(x)


def add(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return compiled(ops, ops.add)(x, x.flip(1).contiguous())


def add_of_parts(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[1] // 2

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = ops.split(x, [half, half])
        return ops.add(second, first)

    return compiled(ops, function)(x)


def scale_rows(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return compiled(ops, ops.scale_rows)(x, positions.float()[:, None].contiguous())


def concat_of_parts(ops: Ops, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The row's two unequal parts, the other way round, and the row after them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = ops.split(x, [1, x_width - 1])
        return ops.concat([second, first, x])

    x_width = x.shape[1]
    return compiled(ops, function)(x)


FUNCTIONS = [
    norm,
    norm_of_heads,
    rope,
    rope_of_heads,
    rope_interleaved,
    silu_mul,
    add,
    add_of_parts,
    scale_rows,
    concat_of_parts,
]


def rows_and_positions(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return random(ROWS, size, seed=2) * 5, torch.randint(0, 5000, (ROWS,), generator=generator)


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("function", FUNCTIONS, **NAMES)
@settings(max_examples=20, derandomize=True)
@given(
    size=st.sampled_from(SIZES),
    rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4)
    | st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS),
    offset=st.integers(0, 17),
    poison=st.sampled_from([float("nan"), float("inf")]),
)
def test_a_row_ignores_its_neighbours(
    family: Family, function: RowFunction, size: int, rows: list[int], offset: int, poison: float
) -> None:
    if family is REFERENCE:
        size = min(size, 66)
    x, positions = rows_and_positions(size)
    expected = function(family.at(1), x, positions)
    poisoned = torch.full_like(x, poison)
    poisoned[rows] = x[rows]
    for count in THREADS:
        ops = family.at(count)
        actual = function(ops, at_offset(x[rows], offset), positions[rows])
        assert same_bits(actual, expected[rows])
        assert same_bits(function(ops, poisoned, positions)[rows], expected[rows])


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_values_of_rms_norm(family: Family, size: int) -> None:
    x, positions = rows_and_positions(size)
    for function, heads in ((norm, 1), (norm_of_heads, 2)):
        wide = x.double().view(ROWS, heads, -1)
        scale = (wide.pow(2).mean(2, keepdim=True) + 1e-5).rsqrt()
        exact = (wide * scale * random(size // heads, seed=3).double()).view(x.shape)
        # A sum of squares is off by at most size + 1 roundings, its root by half of that.
        bound = (size / 2 + 6) * EPS * exact.abs() + TINY
        assert ((function(family.at(2), x, positions) - exact).abs() <= bound).all()


@pytest.mark.parametrize("family", ALL, **NAMES)
def test_a_norm_keeps_zeros_and_shows_what_is_not_finite(family: Family) -> None:
    x = torch.zeros(4, 24)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    x[3] = 1e25  # its square is infinite
    actual = norm(family.at(1), x, torch.zeros(4))
    assert same_bits(actual[0], torch.zeros(24) * random(24, seed=3))
    assert actual[1].isnan().all()
    assert actual[2, 4].isnan()
    assert (actual[3] == 0).all()


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_values_of_rope(family: Family, size: int) -> None:
    x, positions = rows_and_positions(size)
    positions[:3] = torch.tensor([0, 131_071, 1 << 20])
    angles = (positions.float()[:, None] * frequencies(size)).double()
    cos, sin = (part.float().double().repeat(1, 2) for part in (angles.cos(), angles.sin()))
    wide = x.double()
    turned = torch.cat([-wide[:, size // 2 :], wide[:, : size // 2]], dim=1)
    exact = wide * cos + turned * sin
    bound = 2 * EPS * ((wide * cos).abs() + (turned * sin).abs()) + TINY
    for count in (1, 3):
        actual = rope_of_heads(family.at(count), x, positions)
        assert ((actual - exact.repeat(1, 3)).abs() <= bound.repeat(1, 3)).all()
    assert same_bits(actual[0], (x[0] + 0 * x[0].flip(0)).repeat(3))


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_interleaved_rope_turns_the_same_pairs(family: Family, size: int) -> None:
    x, positions = rows_and_positions(size)
    order = torch.arange(size).view(2, -1).T.flatten()  # 0, half, 1, half + 1, ...
    halves = rope(family.at(2), x, positions)
    pairs = rope_interleaved(family.at(2), x[:, order].contiguous(), positions)
    assert same_bits(pairs, halves[:, order])


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_scaled_and_joined_values_are_exact(family: Family, size: int) -> None:
    x, positions = rows_and_positions(size)
    ops = family.at(2)
    assert same_bits(scale_rows(ops, x, positions), x * positions.float()[:, None])
    joined = torch.cat([x[:, 1:], x[:, :1], x], dim=1)
    assert same_bits(concat_of_parts(ops, x, positions), joined)


@pytest.mark.parametrize("family", ALL, **NAMES)
def test_angles_are_rounded_once(family: Family) -> None:
    """Taken in float64 of a product in float32: the same bits in every implementation."""
    inv_freq, ops = frequencies(64), family.at(2)
    positions = torch.cat([torch.arange(300), torch.tensor([8191, 100_000, 1 << 20])])
    exact = (positions.float()[:, None] * inv_freq).double()
    for part, wanted in enumerate((exact.cos(), exact.sin())):
        actual = compiled(ops, lambda at, part=part: ops.angles(inv_freq, at)[part])(positions)
        assert same_bits(actual, wanted.float())


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_values_of_silu_mul(family: Family, size: int) -> None:
    x, positions = rows_and_positions(size)
    x[0] *= 40  # silu's exp overflows
    gate, up = x.double()[:, : size // 2], x.double()[:, size // 2 :]
    exact = gate / (1 + (-gate).exp()) * up
    # exp: 4 units in the last place; four more roundings. Below -87 exp(-gate) may overflow, or
    # stay at its largest value, and silu comes out as anything from gate * exp(-87) to 0.
    bound = 8 * EPS * exact.abs() + TINY
    bound += torch.where(gate < -87, 1.7e-38 * gate.abs() * up.abs(), 0.0)
    for rows in (1, 2, ROWS):  # with few rows, threads share a row
        actual = silu_mul(family.at(3), x[:rows], positions[:rows])
        assert ((actual - exact[:rows]).abs() <= bound[:rows]).all()


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("size", [1, 7, 33, 576])
def test_add_is_one_rounding(family: Family, size: int) -> None:
    x, y = random(9, size), random(9, size, seed=1) * 1e-3
    x[0], y[0] = -0.0, -0.0
    x[1], y[1] = 3e38, 3e38
    ops = family.at(2)
    assert same_bits(compiled(ops, ops.add)(x, y), x + y)


def test_the_same_values_on_every_instruction_set_for_what_is_rounded_once() -> None:
    x, positions = rows_and_positions(66)
    for function in (rope, add):
        first = function(REFERENCE.at(1), x, positions)
        for family in FLOAT:
            assert same_bits(function(family.at(1), x, positions), first)
