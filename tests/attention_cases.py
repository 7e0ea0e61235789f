"""Requests for attention tests: computed together, in pieces or alone, over shuffled blocks."""

from dataclasses import dataclass, replace

import torch
from bits import same_bits
from hypothesis import strategies as st
from implementations import THREADS, Family, compiled

from eyas.attention.chunked_local import split_at_chunks
from eyas.ops.base import AttentionShape, AttentionSpan, KVShape, Ops

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny
SMALLEST_WEIGHT = 1.7e-38  # exp(-87): what a weight may be instead of less
SCALE = 0.3
BLOCK_SIZES = [1, 3, 8, 16, 24, 32, 200]
HEAD_DIMS = [2, 8, 24, 64, 128]
EDGES = [63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 383, 384]  # of key tiles and spans


@dataclass(frozen=True)
class Request:
    """Queries, keys and values [length, heads, D] of all positions of one request, which then
    computes the last ``num_queries`` of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    num_queries: int


@dataclass(frozen=True)
class Case:
    """With a ``chunk``, attention is chunked and local: over virtual batches."""

    shape: AttentionShape
    block_size: int
    dtype: torch.dtype
    requests: tuple[Request, ...]
    chunk: int | None = None


def request(
    shape: AttentionShape, length: int, num_queries: int, seed: int, value_scale: float = 1.0
) -> Request:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(length, heads, shape.head_dim, generator=generator)
        for heads in (shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    return Request(q, k, v * value_scale, num_queries)


@st.composite
def cases(draw: st.DrawFn, max_queries: int, max_position: int) -> Case:
    kv_heads = draw(st.integers(1, 3))
    shape = AttentionShape(
        num_query_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        window=draw(st.none() | st.integers(1, 200)),
    )
    requests = []
    for seed in range(draw(st.integers(1, 4))):
        num_queries = draw(st.just(1) | st.integers(1, 6) | st.integers(1, max_queries))
        edges = [edge for edge in EDGES if edge <= max_position]
        position = draw(st.integers(0, max_position) | st.sampled_from(edges))
        # Denormal values make zeros of both signs.
        scale = draw(st.sampled_from([1.0, 1.0, 1e-44]))
        requests.append(request(shape, position + num_queries, num_queries, seed, scale))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    return Case(shape, draw(st.sampled_from(BLOCK_SIZES)), dtype, tuple(requests))


def run(ops: Ops, case: Case, seed: int = 0) -> list[torch.Tensor]:
    """The outputs [num_queries, Q, D] of each request, all computed in one batch.

    The cache is NaN but for the keys before each span that its first query can see; blocks are
    shuffled, and so is the order of the spans' rows; blocks that no query can see are not in the
    tables.
    """
    shape, size = case.shape, case.block_size
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(one.k) for one in case.requests]
    counts = [(length + size - 1) // size for length in lengths]
    free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    kv = ops.allocate_kv(
        KVShape(1, len(free), size, shape.num_kv_heads, shape.head_dim), case.dtype
    )
    layer = kv.layers[0]
    layer.keys.fill_(float("nan"))
    layer.values.fill_(float("nan"))
    order = torch.randperm(len(case.requests), generator=generator).tolist()
    rows, spans, row = {}, [], 0
    for i in order:
        one = case.requests[i]
        start = lengths[i] - one.num_queries
        visible = 0 if shape.window is None else max(0, start - shape.window + 1)
        if case.chunk is not None:
            visible = start - start % case.chunk
        first = visible // size
        blocks = [free.pop() for _ in range(first, counts[i])]
        known = torch.arange(first * size, start)
        places = (torch.tensor(blocks)[known // size - first], known % size)
        layer.keys[places] = one.k[known].to(case.dtype)
        layer.values[places] = one.v[known].to(case.dtype)
        spans.append(AttentionSpan(row, one.num_queries, start, first, tuple(blocks)))
        rows[i] = slice(row, row + one.num_queries)
        row += one.num_queries

    def inputs(name: str) -> torch.Tensor:
        return torch.cat(
            [getattr(case.requests[i], name)[-case.requests[i].num_queries :] for i in order]
        ).flatten(1)

    if case.chunk is not None:
        spans = split_at_chunks(spans, case.chunk, size)
    plan = ops.plan_attention(shape, spans[::-1], size)
    attend = compiled(ops, lambda plan, kv, q, k, v: ops.attention(plan, kv, 0, q, k, v, SCALE))
    out = attend(plan, kv, inputs("q"), inputs("k"), inputs("v")).view(row, -1, shape.head_dim)
    return [out[rows[i]] for i in range(len(case.requests))]


def pieces(one: Request, sizes: list[int]) -> list[Request]:
    """The same queries as requests of their own, each ending where its piece of them ends."""
    parts: list[Request] = []
    end = len(one.k) - one.num_queries
    while end < len(one.k):
        size = min(sizes[len(parts) % len(sizes)], len(one.k) - end)
        end += size
        parts.append(replace(one, q=one.q[:end], k=one.k[:end], v=one.v[:end], num_queries=size))
    return parts


def check_row_independence(family: Family, case: Case, sizes: list[int]) -> None:
    expected = run(family.at(1), case)
    for seed, count in enumerate(THREADS):
        ops = family.at(count)
        for actual, wanted in zip(run(ops, case, seed), expected, strict=True):
            assert same_bits(actual, wanted)
        for one, wanted in zip(case.requests, expected, strict=True):
            split = replace(case, requests=tuple(pieces(one, sizes)))
            assert same_bits(torch.cat(run(ops, split, seed)), wanted)
    one = case.requests[0]
    for count, part in zip(THREADS, pieces(one, sizes), strict=False):
        alone = run(family.at(count), replace(case, requests=(part,)))[0]
        done = len(part.k) - part.num_queries - (len(one.k) - one.num_queries)
        assert same_bits(alone, expected[0][done : done + part.num_queries])


def exact_attention(case: Case, one: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in float64 over the rounded cache, and a bound of a float32 kernel's error:
    scores are off by D roundings of |q| |k|, so weights by as much relatively, twice with their
    sum; then the roundings of the sums over keys and of the merges of tiles and spans."""
    group = case.shape.num_query_heads // case.shape.num_kv_heads
    k, v = (part.to(case.dtype).double().repeat_interleave(group, dim=1) for part in (one.k, one.v))
    q = one.q[-one.num_queries :].double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    sizes = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * SCALE
    keys = torch.arange(len(k))
    positions = keys[-one.num_queries :, None]
    hidden = keys > positions
    if case.shape.window is not None:
        hidden |= keys <= positions - case.shape.window
    if case.chunk is not None:
        hidden |= keys // case.chunk != positions // case.chunk
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    score_error = (case.shape.head_dim + 2) * EPS * sizes.masked_fill(hidden, 0).amax(-1)
    # exp rounds relative to its argument's magnitude too: a difference of scores.
    relative = 2 * score_error + (len(k) + 40) * EPS + 4 * EPS * scores.abs().amax(-1)
    spread = torch.einsum("hqk,khd->qhd", weights, v.abs())
    floor = SMALLEST_WEIGHT * v.abs().sum(0) + 2 * TINY
    return out, relative.T[:, :, None] * spread + floor


def check_values(ops: Ops, case: Case) -> None:
    for one, actual in zip(case.requests, run(ops, case), strict=True):
        exact, bound = exact_attention(case, one)
        assert ((actual.double() - exact).abs() <= bound).all()
