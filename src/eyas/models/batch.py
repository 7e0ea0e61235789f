"""Segments of requests -> one ForwardBatch for one model. Used by the runner and by drafters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.attention.chunked_local import split_at_chunks
from eyas.models.base import ForwardBatch, LayerGroup
from eyas.ops.base import AttentionSpan, Ops
from eyas.types import BlockTable


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request: ``token_ids[i]`` stands at ``position + i``; ``tables``
    has one entry per layer group of the model."""

    token_ids: Sequence[int]
    position: int
    tables: Sequence[BlockTable]


def build_batch(
    segments: Sequence[Segment], groups: Sequence[LayerGroup], ops: Ops, block_size: int
) -> ForwardBatch:
    """Concatenate the segments, and plan attention once per layer group.

    Metadata belongs to a group: each plan is built from that group's own shape and tables.
    """
    token_ids = [token for segment in segments for token in segment.token_ids]
    positions = [
        position
        for segment in segments
        for position in range(segment.position, segment.position + len(segment.token_ids))
    ]
    plans = []
    for index, group in enumerate(groups):
        spans = _spans(segments, index)
        if group.kv.chunk is not None:
            spans = split_at_chunks(spans, group.kv.chunk, block_size)
        plans.append(ops.plan_attention(group.attention, spans, block_size))
    return ForwardBatch(np.array(token_ids, np.int64), np.array(positions, np.int64), tuple(plans))


def _spans(segments: Sequence[Segment], group_index: int) -> list[AttentionSpan]:
    spans, row = [], 0
    for segment in segments:
        table = segment.tables[group_index]
        count = len(segment.token_ids)
        spans.append(AttentionSpan(row, count, segment.position, table.first, table.blocks))
        row += count
    return spans
