"""linear and embed for float32 activations, and what packing does: over every stored format."""

from functools import cache

import pytest
import torch
from bits import at_offset, random, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, FLOAT, INT8, REFERENCE, THREADS, Family, compiled
from in_memory import InMemoryTensor, RawTensor
from stored_weights import (
    FLOATS,
    FORMATS,
    NO_KERNEL,
    QUANTISED,
    block_inputs,
    encode,
    random_weight,
)

from eyas.ops import native
from eyas.ops.base import Handle, Ops
from eyas.ops.native import NativeOps

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
ROWS = 70
NAMES = {"ids": lambda value: getattr(value, "name", None)}
CASES = [
    *((REFERENCE, format) for format in ("f32", "q6_k")),
    *((family, format) for family in FLOAT for format in FORMATS),
    *((family, format) for family in INT8 for format in QUANTISED),
]


def run_linear(ops: Ops, handle: Handle, x_TK: torch.Tensor) -> torch.Tensor:
    return compiled(ops, lambda x: ops.linear(handle, x))(x_TK)


def run_embed(ops: Ops, handle: Handle, ids_T: torch.Tensor) -> torch.Tensor:
    return compiled(ops, lambda ids: ops.embed(handle, ids))(ids_T)


@cache
def packed(family: Family, format: str, num_threads: int) -> tuple[Ops, Handle]:
    """A weight [33, K] with a bias, the same for all threads."""
    ops = family.at(num_threads)
    weight = random_weight(format, 33, block_inputs(format) * (100 if format in FLOATS else 2))
    return ops, ops.pack_linear([weight], random(33, seed=1))


@cache
def everything(family: Family, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ROWS rows, and what one thread makes of them."""
    ops, handle = packed(family, format, 1)
    x_TK = random(ROWS, block_inputs(format) * (100 if format in FLOATS else 2), seed=2)
    return x_TK, run_linear(ops, handle, x_TK)


@pytest.mark.parametrize(("family", "format"), CASES, **NAMES)
def test_every_number_of_rows_and_threads_gives_the_same_bits(family: Family, format: str) -> None:
    x_TK, expected = everything(family, format)
    for count in range(1, ROWS + 1):
        generator = torch.Generator().manual_seed(count)
        rows = torch.randperm(ROWS, generator=generator)[:count]
        ops, handle = packed(family, format, THREADS[count % len(THREADS)])
        actual = run_linear(ops, handle, at_offset(x_TK[rows], count % 17))
        assert same_bits(actual, expected[rows]), count


@pytest.mark.parametrize("family", [REFERENCE, *FLOAT, *INT8], **NAMES)
@settings(max_examples=25, derandomize=True)
@given(
    format=st.sampled_from(QUANTISED),
    rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=20),
    poison=st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38]),
    count=st.sampled_from(THREADS),
)
def test_a_row_ignores_its_neighbours(
    family: Family, format: str, rows: list[int], poison: float, count: int
) -> None:
    format = "q6_k" if family is REFERENCE else format
    x_TK, expected = everything(family, format)
    ops, handle = packed(family, format, count)
    assert same_bits(run_linear(ops, handle, x_TK[rows]), expected[rows])
    poisoned = torch.full_like(x_TK, poison)
    poisoned[::2, 5:] = 1.0
    poisoned[rows] = x_TK[rows]
    assert same_bits(run_linear(ops, handle, poisoned)[rows], expected[rows])


def test_float_weights_ignore_neighbours_that_are_not_finite() -> None:
    for family in FLOAT:
        for format in FLOATS:
            x_TK, expected = everything(family, format)
            ops, handle = packed(family, format, 2)
            poisoned = torch.full_like(x_TK, float("nan"))
            poisoned[::3] = x_TK[::3]
            assert same_bits(run_linear(ops, handle, poisoned)[::3], expected[::3])


def check_values(ops: Ops, weight: RawTensor, num_rows: int) -> None:
    num_outputs, num_inputs = weight.shape
    bias, x_TK = random(num_outputs, seed=1), random(num_rows, num_inputs, seed=2)
    for added in (bias, None):
        handle = ops.pack_linear([weight], added)
        stored, wide = weight.read().double(), x_TK.double()
        exact = wide @ stored.T + (0 if added is None else added.double())
        # K products and K additions, in any order (Higham 2002, section 3.1), then the bias.
        bound = (num_inputs + 2) * EPS * (wide.abs() @ stored.abs().T + bias.abs()) + TINY
        assert ((run_linear(ops, handle, x_TK).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("num_outputs", [1, 7, 15, 16, 17, 33])
def test_values(family: Family, num_outputs: int) -> None:
    for format in FORMATS if family is not REFERENCE else ("f32", "q4_k"):
        for blocks in (1, 3, 33) if format in FLOATS else (1, 3):
            weight = random_weight(format, num_outputs, block_inputs(format) * blocks)
            check_values(family.at(2), weight, 3)


@pytest.mark.parametrize("family", FLOAT, **NAMES)
@pytest.mark.parametrize(
    ("format", "num_outputs", "num_inputs"),
    [("f32", 3072, 576), ("bf16", 33, 4100), ("f16", 2050, 16), ("q4_k", 576, 1536)],
)
def test_values_of_large_weights(
    family: Family, format: str, num_outputs: int, num_inputs: int
) -> None:
    check_values(family.at(3), random_weight(format, num_outputs, num_inputs), 5)


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *((family, format) for family in FLOAT for format in ("f32", "q8_0", "q6_k")),
        *((family, format) for family in INT8 for format in ("q8_0", "q6_k")),
    ],
    **NAMES,
)
def test_blocks_of_rows_that_fill_the_cache_give_the_same_bits(family: Family, format: str) -> None:
    """More inputs than fit into the cache for all the rows at once."""
    num_inputs = 8192
    weight, x_TK = random_weight(format, 17, num_inputs), random(60, num_inputs, seed=2)
    ops = family.at(2)
    handle = ops.pack_linear([weight], None)
    actual = run_linear(ops, handle, x_TK)
    for row in (0, 3, 11, 12, 47, 48, 58, 59):
        assert same_bits(actual[row : row + 1], run_linear(ops, handle, x_TK[row : row + 1]))


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("format", [*FORMATS, *NO_KERNEL])
def test_every_stored_value_is_kept_bit_for_bit(family: Family, format: str) -> None:
    """A row that is 1 at one input and 0 elsewhere gives the weight's values at that input."""
    size = block_inputs(format)
    num_inputs = 70 if size == 1 else 2 * size
    num_outputs = 35 if family is not REFERENCE else 3
    weights = [random_weight(format, num_outputs, num_inputs)]
    if format in FORMATS and size <= 32:
        weights.append(encode(format, random(num_outputs, num_inputs)))
    for weight in weights:
        ops = family.at(2)
        actual = run_linear(ops, ops.pack_linear([weight], None), torch.eye(num_inputs))
        assert same_bits(actual.T, weight.read() + 0.0)  # a sum from 0 on is never -0


@pytest.mark.parametrize("family", [REFERENCE, *FLOAT, *INT8], **NAMES)
@pytest.mark.parametrize("format", [*FORMATS, *NO_KERNEL])
def test_an_embedding_is_looked_up_and_is_a_head(family: Family, format: str) -> None:
    size = block_inputs(format)
    weight = random_weight(format, 50, 24 if size == 1 else 2 * size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.randperm(50, generator=generator), torch.tensor([49, 0, 0, 16, 15])])
    x = random(5, weight.shape[1], seed=1)
    for count in THREADS:
        ops = family.at(count)
        table = ops.pack_embedding(weight)
        assert same_bits(run_embed(ops, table, ids), weight.read()[ids])
        assert same_bits(run_embed(ops, table, ids[:1]), weight.read()[ids[:1]])
        separate = ops.pack_linear([weight], None)
        assert same_bits(run_linear(ops, table, x), run_linear(ops, separate, x))


@pytest.mark.parametrize("family", [*ALL, *INT8], **NAMES)
@pytest.mark.parametrize("formats", [("q4_k", "q6_k", "q4_k"), ("q8_0", "q8_0", "q4_1"), ("f32",)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_stacked_weights_are_the_separate_ones(
    family: Family, formats: tuple[str, ...], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_CHUNK_BYTES", 1)  # one panel at a time
    ops = family.at(3)
    x = random(9, 256, seed=5)
    sizes = (7, 33, 1) if len(formats) > 1 else (40,)
    weights = [
        random_weight(format, size, 256, seed=size)
        for format, size in zip(formats, sizes, strict=True)
    ]
    bias = random(sum(sizes), seed=3) if with_bias else None
    actual = run_linear(ops, ops.pack_linear(weights, bias), x)
    assert [weight.releases for weight in weights] == [1] * len(weights)
    start = 0
    for weight, size in zip(weights, sizes, strict=True):
        own = None if bias is None else bias[start : start + size]
        expected = run_linear(ops, ops.pack_linear([weight], own), x)
        assert same_bits(actual[:, start : start + size], expected)
        start += size


def test_quantised_weights_stacked_on_float_ones_meet_float_activations() -> None:
    for floats, int8 in zip(FLOAT, INT8, strict=True):
        x = random(4, 256, seed=5)
        weights = [random_weight(format, 20, 256) for format in ("q8_0", "bf16")]
        actual = run_linear(int8.at(2), int8.at(2).pack_linear(weights, None), x)
        expected = [
            run_linear(floats.at(1), floats.at(1).pack_linear([weight], None), x)
            for weight in weights
        ]
        assert same_bits(actual, torch.cat(expected, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["f32", "bf16", "q4_k"])
def test_a_weight_type_rounds_stored_values(dtype: torch.dtype, format: str) -> None:
    weight = random_weight(format, 20, 256)
    ops = NativeOps(dtype, num_threads=1)
    embedded = run_embed(ops, ops.pack_embedding(weight), torch.arange(20))
    assert same_bits(embedded, weight.read().to(dtype).float())


def test_a_weight_that_float16_cannot_hold_is_refused() -> None:
    weight = InMemoryTensor(torch.full((3, 4), 70000.0), "layers.0.big.weight")
    with pytest.raises(ValueError, match=r"layers\.0\.big\.weight .*bfloat16 or float32"):
        NativeOps(torch.float16, num_threads=1).pack_linear([weight], None)


@pytest.mark.parametrize("family", [REFERENCE, *FLOAT, *INT8], **NAMES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(family: Family, format: str, value: float) -> None:
    good = random_weight(format, 20, 256)
    raw = random_weight(format, 18, 256).read_raw().copy()
    width = 4 if format == "f32" else 2
    bits = torch.tensor([value], dtype=torch.bfloat16 if format == "bf16" else torch.float16)
    if format == "f32":
        bits = bits.float()
    # The last block's scale (q6_k keeps it at the end), or the last value.
    at = {**dict.fromkeys(FLOATS, -width), "q6_k": -2}.get(format)
    if at is None:
        at = raw.shape[1] // (256 // block_inputs(format)) * (256 // block_inputs(format) - 1)
    raw[17, raw.shape[1] + at if at < 0 else at :][:width] = bits.view(torch.uint8).numpy()
    bad = RawTensor(raw, format, "layers.3.bad.weight")
    with pytest.raises(ValueError, match=r"layers\.3\.bad\.weight"):
        family.at(2).pack_linear([good, bad], None)
