"""Running an attention plan for one layer.

Per item: scores, the row's maximum and sum in this tile, the values weighted by
exp(score - maximum); then the merge of an online softmax (Milakov and Gimelshein 2018) into the
block's running maximum, sum and values. Why a row's bits don't depend on its neighbours:

* every product has one shape (``row_exact``), and everything else is elementwise or per row;
* hidden scores are replaced by -inf, and the maximum starts at the lowest finite number: in a
  wholly hidden tile exp(-inf - lowest) = 0, so it adds 0 to a sum that it scales by exp(0) = 1;
* keys that aren't the span's may be NaN. Their scores are hidden, their values are set to 0.

One case is left: a value of a *later* row of the span that isn't finite (a float16 cache overflows
at 65504) meets a weight of 0 in an earlier row, and 0 * inf is NaN. So if anything in the result is
not finite, the spans are run again as spans of one token, whose keys end with the token itself.
"""

from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import torch

from eyas.ops.attention_plan import KEY_TILE, AttentionPlan, Chunk, build_plan
from eyas.ops.base import KVLayer
from eyas.ops.exact_math import Array, array
from eyas.ops.row_exact import ROWS

_LOWEST = float(np.finfo(np.float32).min)

Product = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # two operands and where it goes


class _Buffers:
    """Room for the largest chunk. Chunks run one after the other and use its first part."""

    def __init__(self, plan: AttentionPlan) -> None:
        heads, head_dim = plan.shape.num_kv_heads, plan.shape.head_dim
        items = max(chunk.num_items for chunk in plan.chunks)
        tiles = max(chunk.num_tiles for chunk in plan.chunks)
        self.keys = torch.empty(tiles * KEY_TILE, heads, head_dim)
        self.values = torch.empty(tiles * KEY_TILE, heads, head_dim)
        self.queries = torch.empty(heads * items * ROWS, head_dim)
        self.scores = torch.empty(heads * items * ROWS * KEY_TILE)


@dataclass(frozen=True, slots=True)
class _BoundChunk:
    """A chunk and its views of the buffers.

    ``keys`` and ``values`` [units, unit * G * D], ``value_rows`` [tiles * KEY_TILE, G * D] and
    ``queries`` [G * items * ROWS, D] are what is gathered. Per KV head, ``scoring`` multiplies
    queries and keys into scores, ``weighting`` scores and values into where the queries were, which
    are no longer needed then. ``scores`` [G, items, rows, KEY_TILE] and ``results``
    [G, items, rows, D] are the blocks' real rows.
    """

    chunk: Chunk
    keys: torch.Tensor
    values: torch.Tensor
    value_rows: torch.Tensor
    queries: torch.Tensor
    scoring: tuple[Product, ...]
    weighting: tuple[Product, ...]
    scores: Array
    results: Array


class TiledAttention:
    """A plan bound to memory, ready to run for each layer of a step."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self.slots_T = plan.slots_T
        buffers = _Buffers(plan)
        self._chunks = tuple(_bind(plan, chunk, buffers) for chunk in plan.chunks)
        # All blocks' running maximum and sum [G, blocks, ROWS] and values [G, blocks, ROWS, D].
        rows = (plan.shape.num_kv_heads, plan.num_blocks, ROWS)
        self._maximum = np.empty(rows, dtype=np.float32)
        self._total = np.empty(rows, dtype=np.float32)
        self._value_rows = torch.empty(plan.num_blocks * rows[0] * ROWS, plan.shape.head_dim)
        self._values = array(self._value_rows).reshape(*rows, plan.shape.head_dim)

    def run(self, q_TQD: torch.Tensor, kv: KVLayer, scale: float, out_TQD: torch.Tensor) -> None:
        """See ``Ops.attention``."""
        # Overflow and NaN are the model's: they may reach the output, but are no reason to warn.
        with np.errstate(over="ignore", invalid="ignore"):
            self._run(q_TQD, kv, scale, out_TQD)
            if isfinite(float(np.add.reduce(array(out_TQD), axis=None))):
                return
            single = _single_tokens(self._plan)
            if len(single.spans) > len(self._plan.spans):
                TiledAttention(single)._run(q_TQD, kv, scale, out_TQD)

    def _run(self, q_TQD: torch.Tensor, kv: KVLayer, scale: float, out_TQD: torch.Tensor) -> None:
        self._maximum.fill(_LOWEST)
        self._total.fill(0.0)
        self._values.fill(0.0)
        queries = torch.mul(q_TQD, scale).view(-1, q_TQD.shape[-1])
        for bound in self._chunks:
            self._run_chunk(bound, queries, kv)

        out = out_TQD.view(-1, q_TQD.shape[-1])
        torch.index_select(self._value_rows, 0, self._plan.result, out=out)
        result = array(out)
        result /= self._total.reshape(-1)[self._plan.result.numpy()][:, None]
        result += 0.0  # -0 becomes 0: a no-op tile may or may not have turned one into the other

    def _run_chunk(self, bound: _BoundChunk, queries: torch.Tensor, kv: KVLayer) -> None:
        chunk = bound.chunk
        if chunk.units is not None:
            _gather(kv.keys, chunk.units, bound.keys)
            _gather(kv.values, chunk.units, bound.values)
            if chunk.dead_keys is not None:
                bound.value_rows.index_fill_(0, chunk.dead_keys, 0.0)
        torch.index_select(queries, 0, chunk.queries, out=bound.queries)
        for query, key, score in bound.scoring:
            torch.bmm(query, key, out=score)

        scores = bound.scores
        if chunk.hidden is not None:
            np.copyto(scores, -np.inf, where=chunk.hidden)
        maximum = np.maximum.reduce(scores, axis=-1, initial=_LOWEST)
        scores -= maximum[..., None]
        np.exp(scores, out=scores)
        total = np.add.reduce(scores, axis=-1)
        for score, value, result in bound.weighting:
            torch.bmm(score, value, out=result)
        self._merge(bound, maximum, total)

    def _merge(self, bound: _BoundChunk, maximum: Array, total: Array) -> None:
        """Merge a chunk's maxima and sums [G, items, rows] and its results into the blocks."""
        for merge in bound.chunk.merges:
            blocks = np.s_[:, merge.start : merge.stop, : bound.chunk.rows]
            items = np.s_[:, merge.item : merge.item + merge.stop - merge.start]
            running = self._maximum[blocks]
            new = np.maximum(running, maximum[items])
            keep, add = np.exp(running - new), np.exp(maximum[items] - new)
            running[...] = new
            running = self._total[blocks]
            running *= keep
            running += total[items] * add
            running = self._values[blocks]
            running *= keep[..., None]
            running += bound.results[items] * add[..., None]


def _bind(plan: AttentionPlan, chunk: Chunk, buffers: _Buffers) -> _BoundChunk:
    heads, head_dim, items = plan.shape.num_kv_heads, plan.shape.head_dim, chunk.num_items
    num_keys = chunk.num_tiles * KEY_TILE
    keys, values = buffers.keys[:num_keys], buffers.values[:num_keys]
    tiles = (chunk.num_tiles, KEY_TILE, heads, head_dim)
    keys_ITGD = keys.view(tiles).expand(items, -1, -1, -1)
    values_ITGD = values.view(tiles).expand(items, -1, -1, -1)
    queries = buffers.queries[: heads * items * ROWS]
    queries_GIRD = queries.view(heads, items, ROWS, head_dim)
    scores_GIRT = buffers.scores[: heads * items * ROWS * KEY_TILE].view(
        heads, items, ROWS, KEY_TILE
    )
    by_unit = (-1, plan.unit * heads * head_dim)
    return _BoundChunk(
        chunk=chunk,
        keys=keys.view(by_unit),
        values=values.view(by_unit),
        value_rows=values.view(-1, heads * head_dim),
        queries=queries,
        scoring=tuple(
            (queries_GIRD[g], keys_ITGD[:, :, g].transpose(1, 2), scores_GIRT[g])
            for g in range(heads)
        ),
        weighting=tuple(
            (scores_GIRT[g], values_ITGD[:, :, g], queries_GIRD[g]) for g in range(heads)
        ),
        scores=array(scores_GIRT)[:, :, : chunk.rows],
        results=array(queries_GIRD)[:, :, : chunk.rows],
    )


def _gather(cache: torch.Tensor, units: torch.Tensor, out: torch.Tensor) -> None:
    """The cache's ``units`` in float32."""
    by_unit = cache.view(-1, out.shape[1])
    if cache.dtype == torch.float32:
        torch.index_select(by_unit, 0, units, out=out)
    else:
        out.copy_(by_unit.index_select(0, units))


def _single_tokens(plan: AttentionPlan) -> AttentionPlan:
    """The same attention as spans of one token each."""
    spans = tuple(
        replace(span, row=span.row + i, num_queries=1, position=span.position + i)
        for span in plan.spans
        for i in range(span.num_queries)
    )
    return build_plan(plan.shape, spans, plan.block_size)
