"""The Ops protocol: every kernel that a model calls. An implementation is passed in, never global.

A model is a plain function over ops, given to ``compile`` once: an implementation may run it call
by call, or record it and replay the record. So between ``compile`` and its result, a *value* is
whatever the implementation hands out, and only ops touch it.

The contract, for every method (tests hold every implementation to it, bit for bit):

* **a row ignores its neighbours**: row i of a value is the same bits whatever the other rows hold,
  however many there are, wherever it stands and however many threads run;
* values are float32 [T, width]; a value never changes once it is made;
* weights are packed once into opaque handles; per call only activations pass;
* a batch's attention is planned once per step and layer group, and run once per layer.

Shapes: T tokens, H hidden, K in, N out, V vocabulary, Q query heads, G KV heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from eyas.parallel import Parallel, Share
from eyas.tensors import StoredTensor

Handle: TypeAlias = Any  # opaque: only the implementation that made it can read it
Array: TypeAlias = npt.NDArray[np.float32]
Value: TypeAlias = Any  # [T, width] float32: a tensor, or what stands for it in a recording


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's paged keys and values, each [num_blocks, block_size, G, D] in whatever strides
    the implementation likes. Slots that hold no accepted token of the request that reads them may
    hold anything, NaN included.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """The layers of one layer group; ``handle`` is the implementation's own."""

    layers: tuple[KVLayer, ...]
    handle: Handle = None


@dataclass(frozen=True, slots=True)
class KVShape:
    """What is to be allocated for a layer group."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


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


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture of experts uses a row's scores, one per expert, of which it takes the ``top_k``
    greatest (of equal ones the lowest expert's).

    "sigmoid_input" (Llama 4): the row is multiplied by the score's sigmoid before it goes into the
    expert, and the outputs are added. "softmax_output" (Mixtral, Qwen3-MoE): the outputs are added
    with the scores' softmax as their weights, taken over the chosen experts if ``normalise``, else
    over all of them.
    """

    top_k: int
    kind: Literal["sigmoid_input", "softmax_output"]
    normalise: bool = True


class Ops(Protocol):
    """See the module's docstring for the contract."""

    name: str
    parallel: Parallel  # this process's place among those that run a model together

    def single(self) -> "Ops":
        """The same ops for a model that every rank holds whole: ``parallel`` is one of one. Its
        values and handles are these ops' too."""
        ...

    def compile(self, function: Callable[..., Value]) -> Callable[..., Array]:
        """``function`` over arrays: int64 [T] or contiguous float32 [T, width], plans and KVCaches,
        in one fixed order. It may be called only once, to record what it does."""
        ...

    def pack_linear(self, weights: Sequence[StoredTensor], bias: torch.Tensor | None) -> Handle:
        """Pack the [N_i, K] weights, stacked along N, into one handle; reads tensor by tensor and
        releases each one's file pages, so that there is never a second copy in memory."""
        ...

    def pack_embedding(self, weight: StoredTensor) -> Handle:
        """Pack a [V, H] table that serves ``embed`` and, as a tied head, ``linear``."""
        ...

    def pack_experts(
        self, gate_up: Sequence[Sequence[StoredTensor]], down: Sequence[StoredTensor]
    ) -> Handle:
        """Pack a mixture of E experts: per expert the weights [.., H] that stack to [2 I, H], gate
        first, and the down weight [H, I]."""
        ...

    def allocate_kv(self, shape: KVShape, dtype: torch.dtype) -> KVCache:
        """Uninitialised; the kernel commits a page only when it is first written. MemoryError if
        there can't be so much."""
        ...

    def plan_attention(
        self, shape: AttentionShape, spans: Sequence[AttentionSpan], block_size: int
    ) -> Handle:
        """Everything about a step's attention that does not depend on the layer. The spans cover
        the rows 0 .. T - 1 once each."""
        ...

    # What a compiled function may call.

    def linear(self, handle: Handle, x_TK: Value) -> Value:
        """x @ weight.T + bias."""
        ...

    def embed(self, handle: Handle, ids_T: Value, first: int = 0) -> Value:
        """Rows of the table, whose ids begin at ``first``; zeros for ids that it doesn't hold."""
        ...

    def all_reduce(self, x: Value) -> Value:
        """The sum of all ranks' ``x``, added up in rank order: ((x_0 + x_1) + x_2) + ..."""
        ...

    def all_gather(self, x: Value, shares: Sequence[Share]) -> Value:
        """All ranks' columns side by side; rank r's are ``shares[r]`` of the result."""
        ...

    def split(self, x: Value, widths: Sequence[int]) -> tuple[Value, ...]:
        """Consecutive columns."""
        ...

    def concat(self, values: Sequence[Value]) -> Value:
        """Columns side by side."""
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def scale_rows(self, x: Value, factor_T1: Value) -> Value:
        """Each row times its factor."""
        ...

    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), of each run of
        ``len(weight)`` values: a row, or each head of it."""
        ...

    def angles(self, inv_freq: torch.Tensor, positions_T: Value) -> Value:
        """The angles of ``rope``: cosine and sine of float32(position * inv_freq)."""
        ...

    def rope(self, x: Value, angles: Value, interleaved: bool = False) -> Value:
        """Rotate each head of D = 2 len(inv_freq) values (Su et al. 2021): pairs (d, d + D/2), as
        Hugging Face's Llama has them, or, ``interleaved``, (2d, 2d + 1), as Llama 4 has."""
        ...

    def silu_mul(self, gate_up: Value) -> Value:
        """silu(gate) * up, with gate the first half of the columns and up the second."""
        ...

    def moe(self, handle: Handle, x: Value, scores: Value, routing: Routing) -> Value:
        """A mixture of experts (Shazeer et al. 2017): for each row x [H], down(silu(gate) * up) of
        the experts that its scores [E] choose, added by ascending expert.

        A row that has a NaN among its scores comes out as NaN. An expert that no row has chosen
        is not read.
        """
        ...

    def attention(
        self, plan: Handle, kv: Value, layer: int, q: Value, k: Value, v: Value, scale: float
    ) -> Value:
        """Store the batch's keys and values [T, G * D] in their slots of layer ``layer`` of the
        KVCache ``kv`` (an input of the compiled function, as the plan is), rounded to its type;
        then causal (and, with a window, sliding) attention of every span over its own blocks.

        Keys are walked in tiles at absolute positions with an online softmax (Milakov and
        Gimelshein 2018); masked values are selected away, never multiplied by zero.
        """
        ...
