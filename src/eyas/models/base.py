"""What the runner knows of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eyas.kv_spec import KVGroupSpec
from eyas.ops.base import Array, AttentionShape, Handle, KVCache, Ops
from eyas.tensors import Weights

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward: T tokens of one or more requests, and one attention plan per layer group of the
    model, in the model's group order."""

    token_ids_T: Ids
    positions_T: Ids
    plans: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a model that share a KV spec; ``attention`` is what their plan needs."""

    kv: KVGroupSpec
    attention: AttentionShape


class Model(Protocol):
    """A decoder-only language model.

    ``groups``: its layer groups; ``forward`` takes one KV cache per group.
    """

    vocab_size: int
    hidden_size: int
    max_position: int  # the longest context it was trained for, in tokens
    groups: tuple[LayerGroup, ...]

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Array:
        """Final-norm hidden states [T, H] of the batch; writes the batch's KV."""
        ...

    def logits(self, hidden_RH: Array) -> Array:
        """Logits [R, V] in float32 of the given rows."""
        ...


class ModelLoader(Protocol):
    """What each file ``models/<model_type>.py`` exports under the name ``load``.

    ``config`` is the Hugging Face config as a dict (a GGUF file's metadata is translated to one).
    ``owner`` says whose KV the groups are. ValueError for a config the model can't honour.
    """

    def __call__(self, config: dict[str, Any], weights: Weights, ops: Ops, owner: str) -> Model: ...
