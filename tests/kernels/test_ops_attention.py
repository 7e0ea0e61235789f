from dataclasses import dataclass, replace

import pytest
import torch
from bits import same_bits, threads
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.ops import row_exact
from eyas.ops.attention_plan import KEY_TILE
from eyas.ops.base import AttentionShape, AttentionSpan, KVLayer, Ops
from eyas.ops.reference import ReferenceOps
from eyas.ops.torch_cpu import TorchOps

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
OPS = [ReferenceOps(), TorchOps()]
SCALE = 0.3


@dataclass(frozen=True)
class Sequence:
    """Queries, keys and values of all positions of one request, which then computes
    the last ``num_queries`` of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    num_queries: int


@dataclass(frozen=True)
class Case:
    shape: AttentionShape
    block_size: int
    dtype: torch.dtype
    sequences: tuple[Sequence, ...]


def sequence(
    shape: AttentionShape, length: int, num_queries: int, seed: int, value_scale: float = 1.0
) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(length, heads, shape.head_dim, generator=generator)
        for heads in (shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    return Sequence(q, k, v * value_scale, num_queries)


@st.composite
def cases(draw: st.DrawFn, max_queries: int, max_position: int) -> Case:
    kv_heads = draw(st.integers(1, 3))
    shape = AttentionShape(
        num_query_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 24, 64])),
        window=draw(st.none() | st.integers(1, 200)),
    )
    sequences = []
    for seed in range(draw(st.integers(1, 4))):
        num_queries = draw(st.integers(1, 6) | st.integers(1, max_queries))
        position = draw(st.integers(0, max_position))
        # Denormal values make zeros of both signs.
        scale = draw(st.sampled_from([1.0, 1e-44]))
        sequences.append(sequence(shape, position + num_queries, num_queries, seed, scale))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    return Case(shape, draw(st.sampled_from([1, 3, 8, 16, 256])), dtype, tuple(sequences))


def run(ops: Ops, case: Case, seed: int = 0) -> list[torch.Tensor]:
    """The outputs [num_queries, Q, D] of each sequence, all computed in one batch.

    The cache is NaN but for the keys before each span that its first query can see; blocks are
    shuffled; those that no query can see are not in the tables.
    """
    generator = torch.Generator().manual_seed(seed)
    size = case.block_size
    lengths = [len(seq.k) for seq in case.sequences]
    counts = [(length + size - 1) // size for length in lengths]
    free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    cache_shape = (len(free) * size, case.shape.num_kv_heads, case.shape.head_dim)
    kv = KVLayer(
        torch.full(cache_shape, float("nan"), dtype=case.dtype),
        torch.full(cache_shape, float("nan"), dtype=case.dtype),
    )
    spans, row = [], 0
    for seq, length, count in zip(case.sequences, lengths, counts, strict=True):
        start = length - seq.num_queries
        visible = 0 if case.shape.window is None else max(0, start - case.shape.window + 1)
        first = visible // size
        blocks = [free.pop() for _ in range(first, count)]
        for position in range(first * size, start):
            slot = blocks[position // size - first] * size + position % size
            kv.keys[slot] = seq.k[position].to(case.dtype)
            kv.values[slot] = seq.v[position].to(case.dtype)
        spans.append(AttentionSpan(row, seq.num_queries, start, first, tuple(blocks)))
        row += seq.num_queries

    def rows(name: str) -> torch.Tensor:
        return torch.cat([getattr(seq, name)[-seq.num_queries :] for seq in case.sequences])

    plan = ops.plan_attention(case.shape, spans, size)
    ops.write_kv(plan, rows("k"), rows("v"), kv)
    out = torch.full_like(rows("q"), float("nan"))
    ops.attention(plan, rows("q"), kv, SCALE, out)
    return list(out.split([seq.num_queries for seq in case.sequences]))


def pieces(seq: Sequence, num_queries: int, sizes: list[int]) -> list[Sequence]:
    """The same queries as sequences of their own, each ending where its piece of them ends."""
    parts, end = [], len(seq.k) - num_queries
    while end < len(seq.k):
        size = min(sizes[len(parts) % len(sizes)], len(seq.k) - end)
        end += size
        parts.append(replace(seq, q=seq.q[:end], k=seq.k[:end], v=seq.v[:end], num_queries=size))
    return parts


def check_row_independence(ops: Ops, case: Case, sizes: list[int], count: int) -> None:
    with threads(1):
        expected = run(ops, case)
    with threads(count):
        for seq, wanted in zip(case.sequences, expected, strict=True):
            split = replace(case, sequences=tuple(pieces(seq, seq.num_queries, sizes)))
            assert same_bits(torch.cat(run(ops, split, seed=1)), wanted)
        for part in pieces(case.sequences[0], case.sequences[0].num_queries, sizes)[:3]:
            alone = run(ops, replace(case, sequences=(part,)), seed=2)[0]
            start = len(part.k) - part.num_queries
            done = start - (len(case.sequences[0].k) - case.sequences[0].num_queries)
            assert same_bits(alone, expected[0][done : done + part.num_queries])


@settings(max_examples=40)
@given(
    case=cases(max_queries=150, max_position=3 * KEY_TILE),
    sizes=st.lists(st.integers(1, 3) | st.integers(1, 80), min_size=1, max_size=4),
    count=st.sampled_from([1, 1, 1, 2]),
)
def test_torch_rows_ignore_their_neighbours(case: Case, sizes: list[int], count: int) -> None:
    check_row_independence(TorchOps(), case, sizes, count)


@settings(max_examples=15)
@given(
    case=cases(max_queries=20, max_position=100),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
def test_reference_rows_ignore_their_neighbours(case: Case, sizes: list[int]) -> None:
    check_row_independence(ReferenceOps(), case, sizes, count=1)


def exact_attention(case: Case, seq: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in float64 over the rounded cache, and a bound of a float32 kernel's error:
    scores are off by D roundings of |q| |k|, so weights by as much relatively, twice with their
    sum; then the roundings of the sums over keys and of the merges of tiles."""
    group = case.shape.num_query_heads // case.shape.num_kv_heads
    k, v = (part.to(case.dtype).double().repeat_interleave(group, dim=1) for part in (seq.k, seq.v))
    q = seq.q[-seq.num_queries :].double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    sizes = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * SCALE
    keys = torch.arange(len(k))
    positions = keys[-seq.num_queries :, None]
    hidden = keys > positions
    if case.shape.window is not None:
        hidden |= keys <= positions - case.shape.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    score_error = (case.shape.head_dim + 2) * EPS * sizes.masked_fill(hidden, 0).amax(-1)
    # exp rounds relative to its argument's magnitude too: a difference of scores.
    relative = 2 * score_error + (len(k) + 40) * EPS + 4 * EPS * scores.abs().amax(-1)
    spread = torch.einsum("hqk,khd->qhd", weights, v.abs())
    return out, relative.T[:, :, None] * spread + 2 * TINY


def check_values(ops: Ops, case: Case) -> None:
    for seq, actual in zip(case.sequences, run(ops, case), strict=True):
        exact, bound = exact_attention(case, seq)
        assert ((actual.double() - exact).abs() <= bound).all()


@settings(max_examples=30)
@given(case=cases(max_queries=150, max_position=3 * KEY_TILE))
def test_torch_values(case: Case) -> None:
    check_values(TorchOps(), case)


@settings(max_examples=10)
@given(case=cases(max_queries=15, max_position=150))
def test_reference_values(case: Case) -> None:
    check_values(ReferenceOps(), case)


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("num_queries", [5, 40])
@pytest.mark.parametrize("poison", [1e6, float("inf"), float("nan")])
def test_later_rows_that_are_not_finite_leave_earlier_ones_alone(
    ops: Ops, num_queries: int, poison: float
) -> None:
    """1e6 is infinite in float16: a draft token's value may overflow the cache, and be rejected."""
    shape = AttentionShape(num_query_heads=6, num_kv_heads=2, head_dim=8, window=None)
    good = sequence(shape, 150, num_queries, seed=0)
    other = sequence(shape, 30, 2, seed=1)
    bad = replace(good, q=good.q.clone(), k=good.k.clone(), v=good.v.clone())
    for part in (bad.q, bad.k, bad.v):
        part[-2] = poison
    case = Case(shape, 16, torch.float16, (good, other))
    expected = run(ops, case)
    actual = run(ops, replace(case, sequences=(bad, other)))
    assert same_bits(actual[0][:-2], expected[0][:-2])
    assert same_bits(actual[1], expected[1])
    alone = pieces(bad, num_queries, [1])
    assert not torch.isfinite(actual[0][-2:]).all()
    for i, part in enumerate(alone):
        single = run(ops, replace(case, sequences=(part,)))[0]
        # Which NaN comes out is up to the hardware; that there is one is not.
        torch.testing.assert_close(single[0], actual[0][i], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
def test_a_tile_that_only_a_neighbour_needs_keeps_the_sign_of_zero(ops: Ops) -> None:
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
    both = Case(shape, 16, torch.float32, (Sequence(q, k, v, 2),))
    first = replace(both, sequences=(Sequence(q[:-1], k[:-1], v[:-1], 1),))
    assert same_bits(run(ops, both)[0][:1], run(ops, first)[0])


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_kv_rounds_into_the_slots_of_its_span_alone(ops: Ops, dtype: torch.dtype) -> None:
    shape = AttentionShape(num_query_heads=2, num_kv_heads=2, head_dim=4, window=8)
    cache = torch.full((7 * 4, 2, 4), float("nan"), dtype=dtype)
    kv = KVLayer(cache, cache.clone())
    # Positions 10 to 12, and 0; block 5 holds positions 8 to 11.
    spans = [AttentionSpan(1, 3, 10, 0, (6, 4, 5, 1)), AttentionSpan(0, 1, 0, 0, (3,))]
    plan = ops.plan_attention(shape, spans, 4)
    k, v = sequence(shape, 4, 1, seed=0).k, sequence(shape, 4, 1, seed=1).v
    ops.write_kv(plan, k, v, kv)
    slots = [3 * 4 + 0, 5 * 4 + 2, 5 * 4 + 3, 1 * 4 + 0]
    assert torch.equal(kv.keys[slots], k.to(dtype))
    assert torch.equal(kv.values[slots], v.to(dtype))
    kv.keys[slots] = float("nan")
    kv.values[slots] = float("nan")
    assert kv.keys.isnan().all()
    assert kv.values.isnan().all()


def test_a_blas_that_is_not_batch_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bmm = torch.bmm

    def skewed(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        bmm(left, right, out=out)
        if len(left) == 1:
            out *= 1 + 2 * EPS

    monkeypatch.setattr(row_exact.torch, "bmm", skewed)
    with pytest.raises(RuntimeError, match=r"2 heads of 8 .* use the reference ops"):
        TorchOps().plan_attention(
            AttentionShape(2, 2, 8, None), [AttentionSpan(0, 1, 0, 0, (0,))], 4
        )
