"""The part of a step's attention that does not depend on the layer.

A span's query rows (its tokens times the query heads that share a KV head, token by token) are cut
into *blocks* of ROWS rows; its keys are cut into *tiles* of KEY_TILE positions, on a grid that
starts at position 0 whatever the span. An *item* is one block against one tile, for every KV head:
two products of one constant shape. Items are run in *chunks*, and merged into their blocks in tile
order.

* Short spans (decoding, verifying) share chunks: each item has its own tile of keys.
* Long spans (prefill) have a chunk per tile: all their blocks share the tile, gathered once.

Both give a row the same bits, since its items have the same shape and the same order. A tile that
only a neighbour in the block needs is an exact no-op for a row: see ``tiled_attention``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from eyas.ops.base import AttentionShape, AttentionSpan
from eyas.ops.row_exact import ROWS

KEY_TILE = 128
_SHORT_SPAN_BLOCKS = 4  # a span of up to so many blocks gathers its keys once per block
_SHORT_CHUNK_ITEMS = 16  # keeps a chunk's keys and values in the cache of a core
_LONG_CHUNK_ITEMS = 64

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Merge:
    """Items ``item ..`` of a chunk go into the blocks ``start .. stop - 1``."""

    start: int
    stop: int
    item: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Items that run together.

    ``units``: which units of the cache (see AttentionPlan) hold the keys, tile by tile; None for
    the tile that the chunk before has gathered. ``dead_keys``: which of the gathered keys are not
    the span's. ``queries``: rows of q [T * Q] for [G, items, ROWS]. ``rows``: blocks hold at most
    so many real rows. ``hidden`` [items, rows, KEY_TILE]: the keys that a row must not see; None if
    every row sees all.
    """

    num_items: int
    num_tiles: int  # num_items, or 1 that all items share
    units: torch.Tensor | None
    dead_keys: torch.Tensor | None
    queries: torch.Tensor
    rows: int
    hidden: Bools | None
    merges: tuple[Merge, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``slots_T``: where each row's key and value are stored. ``unit``: how many consecutive slots
    are gathered as one. ``result``: where each row of out [T * Q] is in [G, blocks, ROWS]."""

    shape: AttentionShape
    spans: tuple[AttentionSpan, ...]
    block_size: int
    unit: int
    num_blocks: int
    slots_T: torch.Tensor
    chunks: tuple[Chunk, ...]
    result: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Per block: its span, how many real rows, its tiles first .. last; and for each of its rows
    (padding repeats the last one) the token's position and the row of q for KV head 0."""

    span: Ints
    count: Ints
    first_tile: Ints
    last_tile: Ints
    positions: Ints  # [blocks, ROWS]
    queries: Ints  # [blocks, ROWS]


class _Layout:
    """The spans' geometry as arrays, from which chunks are cut."""

    def __init__(
        self, shape: AttentionShape, spans: tuple[AttentionSpan, ...], block_size: int
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.unit = gcd(block_size, KEY_TILE)
        self.rows_per_token = shape.num_query_heads // shape.num_kv_heads
        self.start = np.array([span.position for span in spans], dtype=np.int64)
        self.tokens = np.array([span.num_queries for span in spans], dtype=np.int64)
        self.row = np.array([span.row for span in spans], dtype=np.int64)
        self.last_key = self.start + self.tokens - 1
        self.first_key = self._first_visible(self.start)
        self.first_block = np.array([span.first_block for span in spans], dtype=np.int64)
        self.table = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int64)
        for index, span in enumerate(spans):
            self.table[index, : len(span.blocks)] = span.blocks
            assert span.num_queries > 0, span
            assert span.first_block * block_size <= self.first_key[index], span
            end = (span.first_block + len(span.blocks)) * block_size
            assert end > self.last_key[index], span

    def slots(self) -> Ints:
        slots = np.empty(int(self.tokens.sum()), dtype=np.int64)
        for index, row in enumerate(self.row):
            positions = np.arange(self.start[index], self.last_key[index] + 1)
            slots[row : row + len(positions)] = self._slot(np.array([index]), positions[None])[0]
        return slots

    def blocks(self) -> tuple[_Blocks, int]:
        """All blocks, those of the short spans first and among them the ones with the most tiles
        first; and how many blocks are of short spans."""
        rows = self.tokens * self.rows_per_token
        per_span = (rows + ROWS - 1) // ROWS
        span = np.repeat(np.arange(len(rows)), per_span)
        ordinal = np.arange(len(span)) - np.repeat(np.cumsum(per_span) - per_span, per_span)
        first_row = ordinal * ROWS
        count = np.minimum(ROWS, rows[span] - first_row)
        row = first_row[:, None] + np.minimum(np.arange(ROWS), count[:, None] - 1)
        token, head = row // self.rows_per_token, row % self.rows_per_token
        positions = self.start[span][:, None] + token
        queries = (self.row[span][:, None] + token) * self.shape.num_query_heads + head
        first_tile = self._first_visible(positions[:, 0]) // KEY_TILE
        last_tile = positions[:, -1] // KEY_TILE

        long = per_span[span] > _SHORT_SPAN_BLOCKS
        tiles_left = np.where(long, 0, first_tile - last_tile)  # negative: most tiles first
        order = np.lexsort((tiles_left, long))
        blocks = _Blocks(
            span[order],
            count[order],
            first_tile[order],
            last_tile[order],
            positions[order],
            queries[order],
        )
        return blocks, int(len(span) - long.sum())

    def chunk(
        self, blocks: _Blocks, block: Ints, tile: Ints, merges: tuple[Merge, ...], gather: bool
    ) -> Chunk:
        """The chunk of the items (block[i], tile[i]); a single tile is shared by all the blocks."""
        span = blocks.span[block[: len(tile)]]
        keys = tile[:, None] * KEY_TILE + np.arange(KEY_TILE)
        units = dead_keys = None
        if gather:
            first, last = self.first_key[span][:, None], self.last_key[span][:, None]
            # Positions that aren't the span's are read from some slot that is, then ignored.
            heads = np.clip(keys[:, :: self.unit], first // self.unit * self.unit, last)
            units = torch.from_numpy((self._slot(span, heads) // self.unit).reshape(-1))
            dead = np.flatnonzero((keys < first) | (keys > last))
            dead_keys = torch.from_numpy(dead) if len(dead) else None
        rows = int(blocks.count[block].max())
        positions = blocks.positions[block, :rows, None]
        hidden = keys[:, None, :] > positions
        if self.shape.window is not None:
            hidden |= keys[:, None, :] <= positions - self.shape.window
        first_heads = np.arange(self.shape.num_kv_heads) * self.rows_per_token
        queries = first_heads[:, None, None] + blocks.queries[block]
        return Chunk(
            num_items=len(block),
            num_tiles=len(tile),
            units=units,
            dead_keys=dead_keys,
            queries=torch.from_numpy(queries.reshape(-1)),
            rows=rows,
            hidden=hidden if hidden.any() else None,
            merges=merges,
        )

    def result(self, blocks: _Blocks) -> Ints:
        num_blocks, num_kv_heads = len(blocks.span), self.shape.num_kv_heads
        result = np.empty(int(self.tokens.sum()) * self.shape.num_query_heads, dtype=np.int64)
        places = np.arange(num_blocks * ROWS).reshape(num_blocks, ROWS)
        real = np.arange(ROWS) < blocks.count[:, None]
        for kv_head in range(num_kv_heads):
            rows = blocks.queries[real] + kv_head * self.rows_per_token
            result[rows] = places[real] + kv_head * num_blocks * ROWS
        return result

    def _first_visible(self, positions: Ints) -> Ints:
        if self.shape.window is None:
            return np.zeros_like(positions)
        return np.maximum(0, positions - self.shape.window + 1)

    def _slot(self, span: Ints, positions: Ints) -> Ints:
        """The slots of ``positions`` [n, m], row i of the span ``span[i]``."""
        ordinal = positions // self.block_size - self.first_block[span][:, None]
        block = self.table[span[:, None], ordinal]
        slots: Ints = block * self.block_size + positions % self.block_size
        return slots


def build_plan(
    shape: AttentionShape, spans: tuple[AttentionSpan, ...], block_size: int
) -> AttentionPlan:
    """Plan the attention of ``spans``, which cover the rows 0 .. T - 1 once each."""
    layout = _Layout(shape, spans, block_size)
    blocks, num_short = layout.blocks()
    chunks = (*_short_chunks(layout, blocks, num_short), *_long_chunks(layout, blocks, num_short))
    return AttentionPlan(
        shape=shape,
        spans=spans,
        block_size=block_size,
        unit=layout.unit,
        num_blocks=len(blocks.span),
        slots_T=torch.from_numpy(layout.slots()),
        chunks=chunks,
        result=torch.from_numpy(layout.result(blocks)),
    )


def _short_chunks(layout: _Layout, blocks: _Blocks, num_short: int) -> Iterator[Chunk]:
    """Items in the order of their tile's ordinal in the block, so that each chunk's items for one
    ordinal are consecutive blocks."""
    if num_short == 0:
        return
    num_tiles = (blocks.last_tile - blocks.first_tile + 1)[:num_short]
    reach = [int((num_tiles > ordinal).sum()) for ordinal in range(int(num_tiles[0]))]
    block = np.concatenate([np.arange(count) for count in reach])
    ordinal = np.repeat(np.arange(len(reach)), reach)
    tile = blocks.first_tile[block] + ordinal
    for start in range(0, len(block), _SHORT_CHUNK_ITEMS):
        part = slice(start, start + _SHORT_CHUNK_ITEMS)
        breaks = [0, *(np.flatnonzero(np.diff(ordinal[part])) + 1).tolist(), len(block[part])]
        merges = tuple(
            Merge(int(block[start + low]), int(block[start + high - 1]) + 1, low)
            for low, high in pairwise(breaks)
        )
        yield layout.chunk(blocks, block[part], tile[part], merges, gather=True)


def _long_chunks(layout: _Layout, blocks: _Blocks, num_short: int) -> Iterator[Chunk]:
    for span in np.unique(blocks.span[num_short:]):
        own = num_short + np.flatnonzero(blocks.span[num_short:] == span)
        first, last = blocks.first_tile[own], blocks.last_tile[own]
        for tile in range(int(first[0]), int(last[-1]) + 1):
            block = own[(first <= tile) & (tile <= last)]
            for start in range(0, len(block), _LONG_CHUNK_ITEMS):
                part = block[start : start + _LONG_CHUNK_ITEMS]
                merge = Merge(int(part[0]), int(part[-1]) + 1, 0)
                yield layout.chunk(blocks, part, np.array([tile]), (merge,), gather=start == 0)
