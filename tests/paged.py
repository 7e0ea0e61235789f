"""Running a model by hand over a paged cache: shuffled blocks, NaN where nothing true is kept."""

from collections.abc import Sequence

import numpy as np
import torch

from eyas.attention.chunked_local import split_at_chunks
from eyas.models.base import ForwardBatch, Model
from eyas.ops.base import AttentionSpan, KVShape, Ops


class PagedSequence:
    """One sequence's cache in a model's layer groups, and forwards of chunks of it.

    The blocks of a group are a random permutation of its pool; every slot starts as NaN. Blocks
    that no later position can see are dropped from the table and filled with NaN again.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        length: int,
        block_size: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.ops, self.block_size = model, ops, block_size
        self.position = 0
        generator = torch.Generator().manual_seed(seed)
        num_blocks = (length + block_size - 1) // block_size
        pool = num_blocks + 3
        self.tables = [
            torch.randperm(pool, generator=generator)[:num_blocks].tolist() for _ in model.groups
        ]
        self.kv = [
            ops.allocate_kv(
                KVShape(
                    group.kv.num_layers, pool, block_size, group.kv.num_kv_heads, group.kv.head_dim
                ),
                dtype,
            )
            for group in model.groups
        ]
        for cache in self.kv:
            for layer in cache.layers:
                layer.keys.fill_(float("nan"))
                layer.values.fill_(float("nan"))

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Final hidden states [T, H] of the next tokens."""
        count = len(tokens)
        plans = []
        for group, table, cache in zip(self.model.groups, self.tables, self.kv, strict=True):
            first = group.kv.first_needed(self.position) // self.block_size
            for block in table[:first]:
                for layer in cache.layers:
                    layer.keys[block] = float("nan")
                    layer.values[block] = float("nan")
            last = (self.position + count - 1) // self.block_size
            span = AttentionSpan(0, count, self.position, first, tuple(table[first : last + 1]))
            spans = [span]
            if group.kv.chunk is not None:
                spans = split_at_chunks(spans, group.kv.chunk, self.block_size)
            plans.append(self.ops.plan_attention(group.attention, spans, self.block_size))
        positions = np.arange(self.position, self.position + count)
        batch = ForwardBatch(np.array(tokens, np.int64), positions, tuple(plans))
        self.position += count
        return torch.from_numpy(self.model.forward(batch, self.kv))

    def forward_in(self, tokens: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Forward ``tokens`` in chunks of ``sizes`` (repeating the last one)."""
        parts, done = [], 0
        remaining = list(sizes)
        while done < len(tokens):
            size = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            parts.append(self.forward(tokens[done : done + size]))
            done += len(parts[-1])
        return torch.cat(parts)
