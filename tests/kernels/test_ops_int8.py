"""int8 activations: which they are, and that the products of integers are exact."""

import numpy as np
import pytest
import torch
from bits import random, same_bits
from implementations import INT8, Family, compiled
from in_memory import RawTensor
from stored_weights import (
    QUANTISED,
    block_inputs,
    filled_weight,
    identity_weight,
    magnitudes,
    random_weight,
)

from eyas.ops.base import Ops
from eyas.ops.reference import quantise

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
NAMES = {"ids": lambda value: getattr(value, "name", None)}


def run_linear(ops: Ops, weight: RawTensor, x_TK: torch.Tensor) -> torch.Tensor:
    handle = ops.pack_linear([weight], None)
    return compiled(ops, lambda x: ops.linear(handle, x))(x_TK)


def dequantised(x_TK: torch.Tensor) -> torch.Tensor:
    """What int8 kernels know of ``x_TK``, in float64."""
    rows = []
    for row in x_TK.numpy():
        q, scale = quantise(row)
        rows.append(torch.from_numpy(q.astype(np.float64) * np.repeat(scale, 32)))
    return torch.stack(rows)


def activations(num_inputs: int) -> torch.Tensor:
    """Rows of many sizes: ordinary ones, outliers, zeros in groups and rows, ties, tiny, huge."""
    x = random(12, num_inputs, seed=2)
    x[1] *= 10.0 ** torch.linspace(-6, 6, num_inputs)
    x[2, ::37] *= 1000
    x[3, 32:] = 0
    x[4] = 0
    x[5] = torch.arange(num_inputs) % 255 - 126.5  # q is halfway between integers
    x[5, ::32] = 127
    x[6] *= 1e-40
    x[7] *= 1e37 / 4
    x[8] *= torch.tensor([1e-40, 1e-36, 1e-30, 1e30])[torch.arange(num_inputs) // 32 % 4]
    x[9] = -0.0
    x[10] = 127.0 * (1 - 2 * (torch.arange(num_inputs) % 2))
    x[11] *= 1e-36
    return x


@pytest.mark.parametrize("family", INT8, **NAMES)
def test_activations_are_quantised_by_group_and_row(family: Family) -> None:
    x = activations(256)
    expected = []
    for row in x.numpy():
        q, scale = quantise(row)
        expected.append(torch.from_numpy(q.astype(np.float32) * np.repeat(scale, 32)))
    ops = family.at(2)
    actual = run_linear(ops, identity_weight(256), x)
    assert same_bits(actual, torch.stack(expected) + 0.0)
    # They are near what they stand for: a half of a step, which is max |x| / 127; but a group below
    # 1e-35 is as good as 0.
    limit = x.double().abs().view(12, 8, 32).amax(-1).repeat_interleave(32, dim=1)
    error = (actual.double() - x.double()).abs()
    assert (error <= (0.5 / 127 + 2 * EPS) * limit + 1e-35).all()


def check(ops: Ops, weight: RawTensor, x: torch.Tensor) -> None:
    wide = dequantised(x)
    exact = wide @ weight.read().double().T
    # Per group the scale and the sum of inputs are rounded, and at most 2 products are added, in
    # up to two roundings each; gguf's value of a weight is itself rounded twice.
    groups = x.shape[1] // 32
    bound = (4 * groups + 6) * EPS * (wide.abs() @ magnitudes(weight).T) + 8 * groups * TINY
    actual = run_linear(ops, weight, x)
    assert torch.isfinite(actual).all()
    assert ((actual.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("family", INT8, **NAMES)
@pytest.mark.parametrize("format", QUANTISED)
def test_values(family: Family, format: str) -> None:
    for num_outputs, blocks in ((1, 1), (7, 2), (15, 1), (17, 3), (33, 1)):
        num_inputs = block_inputs(format) * blocks
        weight = random_weight(format, num_outputs, num_inputs)
        x = activations(num_inputs)
        x[7] /= 1e4 * num_inputs  # weights are up to about 300
        check(family.at(2), weight, x)


@pytest.mark.parametrize("family", INT8, **NAMES)
@pytest.mark.parametrize("format", ["q4_0", "q8_0", "q4_k", "q6_k"])
def test_values_of_large_weights(family: Family, format: str) -> None:
    check(family.at(3), random_weight(format, 530, 2048), random(9, 2048, seed=3))


@pytest.mark.parametrize("family", INT8, **NAMES)
@pytest.mark.parametrize(
    ("format", "sub_scale"),  # scales within a superblock are signed in q6_k alone
    [*((format, 0xFF) for format in QUANTISED), ("q6_k", 0x80), ("q6_k", 0x7F)],
)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F])
def test_the_largest_integers_do_not_overflow(
    family: Family, fill: int, format: str, sub_scale: int
) -> None:
    """Every nibble 0 or 15, every fifth bit, -128 and 127, against activations of +-127."""
    weight = filled_weight(format, 17, 512, fill, sub_scale)
    k = torch.arange(512)
    x = torch.full((7, 512), 127.0)
    x[1] = -127
    x[2] *= 1 - 2 * (k % 2)
    x[3] *= 1 - 2 * (k // 4 % 2)
    x[4] *= 1 - 2 * (k // 16 % 2)
    x[5, ::3] = 0
    x[6] *= torch.sign(random(512, seed=4))
    assert torch.equal(dequantised(x), x.double())
    check(family.at(1), weight, x)


@pytest.mark.parametrize("family", INT8, **NAMES)
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_makes_its_own_row_nan(
    family: Family, format: str, poison: float
) -> None:
    """Even where the weights it meets are 0."""
    weight, x = random_weight(format, 33, 512), random(9, 512, seed=2)
    zeros = RawTensor(np.zeros_like(weight.read_raw()), format)
    ops = family.at(2)
    expected = run_linear(ops, weight, x)
    x[4, 300:303] = poison
    for one in (weight, zeros):
        actual = run_linear(ops, one, x)
        assert actual[4].isnan().all()
        assert same_bits(actual[5:], expected[5:] if one is weight else torch.zeros(4, 33))
        assert same_bits(actual[:4], expected[:4] if one is weight else torch.zeros(4, 33))
