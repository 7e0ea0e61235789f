"""A model without an engine: one sequence, whose tokens and positions the caller chooses."""

import random
import time
from collections.abc import Sequence
from typing import Any

from eyas.config import EngineConfig
from eyas.executor.inproc import load_executor
from eyas.loading.checkpoint import open_checkpoint
from eyas.models.batch import Segment, build_batch
from eyas.ops.base import Array
from eyas.types import BlockTable

_BLOCK_SIZE = 16
_CHUNK = 512


class ModelEngine:
    """``max_tokens`` is how long the sequence may become; other options are EngineConfig's."""

    def __init__(self, model: str, threads: int, max_tokens: int = 2048, **options: Any) -> None:
        config = EngineConfig(model=model, num_threads=threads, **options)
        executor = load_executor(config, open_checkpoint(model))
        self._runner = executor.runner
        num_blocks = -(-max_tokens // _BLOCK_SIZE)
        count = len(executor.groups)
        executor.allocate_kv((num_blocks,) * count, _BLOCK_SIZE)
        self._tables = (BlockTable(0, tuple(range(num_blocks))),) * count
        self._filled = -1  # length of the random context that is in the cache

    def hidden(self, tokens: Sequence[int], position: int) -> Array:
        """Final hidden states [T, H] of tokens that stand at ``position`` and after it."""
        target, ops = self._runner.target, self._runner.ops
        segment = Segment(tokens, position, self._tables)
        batch = build_batch([segment], target.groups, ops, _BLOCK_SIZE)
        self._filled = -1
        return target.forward(batch, self._runner.kv)

    def logits(self, hidden_RH: Array) -> Array:
        """Logits [R, V]."""
        return self._runner.target.logits(hidden_RH)

    def forward(self, context_len: int, m: int) -> float:
        """Seconds of one forward of ``m`` tokens after ``context_len`` others, with the logits of
        all ``m``. The context is kept for the next call of the same length."""
        tokens = random.Random(1).choices(range(100, 30_000), k=context_len + m)
        if self._filled != context_len:
            for start in range(0, context_len, _CHUNK):
                self.hidden(tokens[start : min(start + _CHUNK, context_len)], start)
        started = time.perf_counter()
        self.logits(self.hidden(tokens[context_len:], context_len))
        seconds = time.perf_counter() - started
        self._filled = context_len
        return seconds
