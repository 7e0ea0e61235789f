"""Attention where values are not finite, or zeros signed; what is written into the cache."""

from dataclasses import replace

import pytest
import torch
from attention_cases import SCALE, Case, Request, pieces, request, run
from bits import random, same_bits
from implementations import ALL, FLOAT, REFERENCE, THREADS, Family, compiled

from eyas.ops.base import AttentionShape, AttentionSpan, KVCache, KVShape, Ops

NAMES = {"ids": lambda value: getattr(value, "name", None)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEY_TILE = 64


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("num_queries", [5, 40])
@pytest.mark.parametrize("poison", [1e6, float("inf"), float("nan")])
def test_later_rows_that_are_not_finite_leave_earlier_ones_alone(
    family: Family, num_queries: int, poison: float
) -> None:
    """1e6 is infinite in float16: a draft token's value may overflow the cache, and be rejected."""
    shape = AttentionShape(num_query_heads=6, num_kv_heads=2, head_dim=8, window=None)
    good = request(shape, 150, num_queries, seed=0)
    other = request(shape, 60, 50, seed=1)
    bad = replace(good, q=good.q.clone(), k=good.k.clone(), v=good.v.clone())
    for part in (bad.q, bad.k, bad.v):
        part[-2] = poison
    case = Case(shape, 16, torch.float16, (good, other))
    expected = run(family.at(1), case)
    for count in THREADS:
        ops = family.at(count)
        actual = run(ops, replace(case, requests=(bad, other)))
        assert same_bits(actual[0][:-2], expected[0][:-2])
        assert same_bits(actual[1], expected[1])
        assert not torch.isfinite(actual[0][-2:]).all()
        for i, part in enumerate(pieces(bad, [1])[-4:], start=num_queries - 4):
            single = run(ops, replace(case, requests=(part,)))[0]
            # Which NaN comes out is up to the hardware; that there is one is not.
            torch.testing.assert_close(single[0], actual[0][i], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("family", ALL, **NAMES)
def test_a_request_with_nan_leaves_the_others_alone(family: Family) -> None:
    shape = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=24, window=20)
    requests = [request(shape, length, 3, seed=length) for length in (140, 50, 70)]
    case = Case(shape, 8, torch.bfloat16, tuple(requests))
    expected = run(family.at(1), case)
    nan = torch.full_like(requests[1].q, float("nan"))
    bad = replace(requests[1], q=nan, k=nan[:, :2], v=nan[:, :2])
    for count in THREADS:
        actual = run(family.at(count), replace(case, requests=(requests[0], bad, requests[2])))
        assert same_bits(actual[0], expected[0])
        assert actual[1].isnan().all()
        assert same_bits(actual[2], expected[2])


@pytest.mark.parametrize("family", ALL, **NAMES)
def test_a_tile_that_only_a_neighbour_needs_keeps_the_sign_of_zero(family: Family) -> None:
    """In the second tile the running value underflows to -0 and -0 is added; the next token's
    third tile would add 0 to that."""
    shape = AttentionShape(num_query_heads=1, num_kv_heads=1, head_dim=2, window=None)
    tile, length = KEY_TILE, 2 * KEY_TILE + 1
    smallest = -(2.0**-149)
    k, v = torch.zeros(length, 1, 2), torch.zeros(length, 1, 2)
    v[0] = smallest
    k[tile, 0, 0] = 1.2 / SCALE  # exp(-1.2) < 1/2, so that products of it underflow
    v[tile : 2 * tile] = smallest
    v[tile] = -0.0
    q = torch.zeros(length, 1, 2)
    q[..., 0] = 1.0
    both, first = Request(q, k, v, 2), Request(q[:-1], k[:-1], v[:-1], 1)
    crowd = request(shape, 60, 60, seed=0)  # in a large batch, neighbours are computed together
    alone = run(family.at(1), Case(shape, 16, torch.float32, (first,)))[0]
    if family is not REFERENCE:
        assert same_bits(alone, torch.full((1, 1, 2), -0.0))
    for count in THREADS:
        together = run(family.at(count), Case(shape, 16, torch.float32, (both, crowd)))[0]
        assert same_bits(together[:1], alone)


@pytest.mark.parametrize("family", ALL, **NAMES)
def test_scores_of_any_size(family: Family) -> None:
    """The greatest score takes all the weight, wherever it is."""
    shape = AttentionShape(num_query_heads=2, num_kv_heads=1, head_dim=8, window=None)
    one = request(shape, 300, 1, seed=0)
    for at in (0, 63, 64, 127, 128, 299):
        k = torch.full_like(one.k, -100.0)
        k[at] = 100.0
        q = torch.ones_like(one.q)
        for count in THREADS:
            case = Case(shape, 16, torch.float32, (replace(one, q=q, k=k),))
            actual = run(family.at(count), case)[0]
            assert same_bits(actual[0], one.v[at].expand(2, 8))


def attend(
    ops: Ops,
    shape: AttentionShape,
    kv: KVCache,
    spans: list[AttentionSpan],
    k: torch.Tensor,
    v: torch.Tensor,
    block_size: int,
    layer: int = 0,
) -> None:
    plan = ops.plan_attention(shape, spans, block_size)
    function = compiled(
        ops, lambda plan, kv, q, k, v: ops.attention(plan, kv, layer, q, k, v, SCALE)
    )
    q = torch.zeros(len(k), shape.num_query_heads * shape.head_dim)
    function(plan, kv, q, k.flatten(1), v.flatten(1))


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, with the same signs of zero; one NaN is as good as another."""
    nan = expected.isnan()
    return same_bits(
        actual.float().masked_fill(actual.isnan(), 7), expected.float().masked_fill(nan, 7)
    ) and torch.equal(actual.isnan(), nan)


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 24, 64])
def test_keys_and_values_are_rounded_into_the_slots_of_their_span_alone(
    family: Family, dtype: torch.dtype, head_dim: int
) -> None:
    shape = AttentionShape(num_query_heads=2, num_kv_heads=2, head_dim=head_dim, window=8)
    # Positions 10 to 12, and 0; block 5 holds positions 8 to 11.
    spans = [AttentionSpan(1, 3, 10, 0, (6, 4, 5, 1)), AttentionSpan(0, 1, 0, 0, (3,))]
    k, v = random(4, 2, head_dim), random(4, 2, head_dim, seed=1)
    k[1, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    # Ties of bfloat16 and of float16, subnormals of float16, and what rounds to its infinity.
    v[2, 1, :4] = torch.tensor([1 + 2.0**-8, 1 + 2.0**-11, 2.0**-25 * 3, 65520.0])
    v[3, 1, :4] = torch.tensor([-3.39e38, -65519.0, 2.0**-25, 1e-41])
    for count in THREADS:
        ops = family.at(count)
        kv = ops.allocate_kv(KVShape(3, 7, 4, 2, head_dim), dtype)
        for layer in kv.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        attend(ops, shape, kv, spans, k, v, 4, layer=1)
        written = (torch.tensor([3, 5, 5, 1]), torch.tensor([0, 2, 3, 0]))
        for cache, rows in ((kv.layers[1].keys, k), (kv.layers[1].values, v)):
            assert same_values(cache[written], rows.to(dtype))
            cache[written] = float("nan")
        for layer in kv.layers:
            assert layer.keys.isnan().all()
            assert layer.values.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_rounding_of_the_cache(dtype: torch.dtype) -> None:
    """All values of the type, those halfway between them, and the floats beside these."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    bits = torch.cat([values, middle]).view(torch.int32)
    floats = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    floats = floats[floats.isfinite()]
    floats = torch.cat([floats, torch.zeros(-len(floats) % 1024)]).view(-1, 1, 1024)
    shape = AttentionShape(1, 1, 1024, 1)
    count = len(floats)
    spans = [AttentionSpan(0, count, 0, 0, tuple(range((count + 15) // 16)))]
    for family in FLOAT:
        ops = family.at(2)
        kv = ops.allocate_kv(KVShape(1, (count + 15) // 16, 16, 1, 1024), dtype)
        attend(ops, shape, kv, spans, floats, floats, 16)
        for cache in (kv.layers[0].keys, kv.layers[0].values):
            assert same_values(cache.flatten(0, 1)[:count], floats.to(dtype))


@pytest.mark.parametrize("family", ALL, **NAMES)
@pytest.mark.parametrize("num_blocks", [1 << 50, 1 << 70])
def test_a_cache_that_no_machine_holds_is_a_memory_error(family: Family, num_blocks: int) -> None:
    with pytest.raises(MemoryError):
        family.at(1).allocate_kv(KVShape(1, num_blocks, 16, 2, 64), torch.float16)
