"""The Ops protocol: every kernel that a model calls. An implementation is passed in, never global.

The contract, for every method (tests hold every implementation to it, bit for bit):

* **a row ignores its neighbours**: row i of an output is the same bits whatever the other rows
  hold, however many there are, wherever it stands and however many threads run;
* outputs are allocated by the caller (``out``), inputs are contiguous float32 tensors, ids and
  positions int64;
* weights are packed once into opaque handles; per call only activations pass;
* a batch's attention is planned once per step and layer group, and run once per layer.

Shapes: T tokens, H hidden, K in, N out, V vocabulary, Q query heads, G KV heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from eyas.tensors import StoredTensor

Handle: TypeAlias = Any  # opaque: only the implementation that made it can read it


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's paged keys and values, each [num_blocks * block_size, G, D].

    A slot is ``block * block_size + position % block_size``. Slots that hold no accepted token of
    the request that reads them may hold anything, NaN included.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One request's rows in the batch: rows ``row .. row + num_queries - 1`` are its positions
    ``position .. position + num_queries - 1``; its keys are positions 0 .. (its last position),
    in the blocks ``blocks``, whose first one holds position ``first_block * block_size``."""

    row: int
    num_queries: int
    position: int
    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer group's plan needs to know of its layers; ``window`` as in KVGroupSpec."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


class Ops(Protocol):
    """See the module's docstring for the contract."""

    name: str

    def pack_linear(self, weights: Sequence[StoredTensor], bias: torch.Tensor | None) -> Handle:
        """Pack the [N_i, K] weights, stacked along N, into one handle; reads tensor by tensor and
        releases each one's file pages, so that there is never a second copy in memory."""
        ...

    def pack_embedding(self, weight: StoredTensor) -> Handle:
        """Pack a [V, H] table that serves ``embed`` and, as a tied head, ``linear``."""
        ...

    def linear(self, handle: Handle, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None: ...

    def embed(self, handle: Handle, ids_T: torch.Tensor, out_TH: torch.Tensor) -> None: ...

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, out_TH: torch.Tensor
    ) -> None:
        """x / sqrt(mean(x^2) + eps) * weight, per row (Zhang and Sennrich 2019). A head-wise norm
        passes [T * heads, D]."""
        ...

    def rope(self, x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
        """Rotate in place, half-rotated layout: pairs (d, d + D/2) (Su et al. 2021, as in HF)."""
        ...

    def silu_mul(self, gate_up_TI: torch.Tensor, out_TI: torch.Tensor) -> None:
        """silu(gate) * up, with gate the first half of the last axis and up the second."""
        ...

    def plan_attention(
        self, shape: AttentionShape, spans: Sequence[AttentionSpan], block_size: int
    ) -> Handle:
        """Everything about a step's attention that does not depend on the layer."""
        ...

    def write_kv(self, plan: Handle, k_TGD: torch.Tensor, v_TGD: torch.Tensor, kv: KVLayer) -> None:
        """Store the batch's keys and values in their slots, rounded to the cache's type."""
        ...

    def attention(
        self, plan: Handle, q_TQD: torch.Tensor, kv: KVLayer, scale: float, out_TQD: torch.Tensor
    ) -> None:
        """Causal (and, with a window, sliding) attention of every span over its own blocks.

        Keys are walked in tiles at absolute positions with an online softmax (Milakov and
        Gimelshein 2018); masked values are selected away, never multiplied by zero.
        """
        ...
