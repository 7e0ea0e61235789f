"""The Drafter protocol: who proposes tokens, and what it is told.

A drafter is one file in this folder, named after its method, that exports ``create``.
The runner never asks which method it is talking to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.models.base import LayerGroup
from eyas.ops.base import KVCache
from eyas.sampling.sampler import SampleState
from eyas.types import BlockTable


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """What a drafter needs of the engine: its own KV layer groups (empty: it keeps no KV)."""

    kv_groups: tuple[LayerGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request that may be drafted for.

    ``state.token_ids`` are its accepted tokens, prompt first, the newest sampled one last.
    ``known`` is how many of them a draft with KV must have processed after this call (in a prefill
    chunk that does not end the prompt: up to the chunk's end). ``max_drafts`` 0 asks for no draft.
    ``tables`` has one entry per KV group of the drafter, with room for ``known + max_drafts - 1``.
    """

    request_id: str
    state: SampleState
    known: int
    kv_length: int
    max_drafts: int
    tables: tuple[BlockTable, ...]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One call's requests, and the drafter's own KV: one cache per group."""

    requests: tuple[DraftRequest, ...]
    kv: Sequence[KVCache]
    block_size: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal: a chain of tokens that would follow the last accepted one.

    ``probs_KV``: the distributions they were drawn from, in "rejection" mode; None means that each
    token was proposed with certainty. ``kv_length``: leading positions of the drafter's KV that
    now hold accepted tokens.
    """

    tokens: tuple[int, ...]
    kv_length: int = 0
    probs_KV: torch.Tensor | None = None


class Drafter(Protocol):
    """``propose`` answers each request of the context in order, with at most ``max_drafts`` tokens
    (fewer, or none, when it has no good guess). What it keeps per request goes in ``forget``."""

    needs: FeatureRequest

    def propose(self, context: DraftContext) -> list[Draft]: ...

    def forget(self, request_ids: Sequence[str]) -> None: ...
