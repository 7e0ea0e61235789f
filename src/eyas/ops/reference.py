"""ReferenceOps: the slow, obvious twin that every other implementation is tested against.

Each row is computed alone, by numpy on one thread, so that it can't depend on another row, on the
number of rows, or on the number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eyas.ops.base import AttentionShape, AttentionSpan, KVLayer
from eyas.ops.packing import pack_rows
from eyas.tensors import StoredTensor

Array = npt.NDArray[np.float32]

_KEY_TILE = 64
_WEIGHT_ROWS = 4096  # bounds the memory of a product's terms


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    shape: AttentionShape
    spans: tuple[AttentionSpan, ...]
    block_size: int


class ReferenceOps:
    """The Ops protocol, one row at a time, in float32."""

    name = "reference"

    def pack_linear(
        self, weights: Sequence[StoredTensor], bias: torch.Tensor | None
    ) -> ReferenceWeight:
        return ReferenceWeight(pack_rows(weights, torch.float32), bias)

    def pack_embedding(self, weight: StoredTensor) -> ReferenceWeight:
        return self.pack_linear([weight], None)

    def linear(self, handle: ReferenceWeight, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        weight, out = handle.weight_NK.numpy(), out_TN.numpy()
        # Overflow and NaN are the model's: they may reach the output, but are no reason to warn.
        with np.errstate(over="ignore", invalid="ignore"):
            for t, x_K in enumerate(x_TK.numpy()):
                for start in range(0, len(weight), _WEIGHT_ROWS):
                    rows = slice(start, start + _WEIGHT_ROWS)
                    out[t, rows] = np.add.reduce(weight[rows] * x_K, axis=-1)
                if handle.bias_N is not None:
                    out[t] += handle.bias_N.numpy()

    def embed(self, handle: ReferenceWeight, ids_T: torch.Tensor, out_TH: torch.Tensor) -> None:
        for t, token_id in enumerate(ids_T.tolist()):
            out_TH[t] = handle.weight_NK[token_id]

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, out_TH: torch.Tensor
    ) -> None:
        for x_H, out_H in zip(x_TH.numpy(), out_TH.numpy(), strict=True):
            out_H[:] = x_H / np.sqrt(np.mean(x_H * x_H) + np.float32(eps)) * weight_H.numpy()

    def rope(self, x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
        half = x_THD.shape[-1] // 2
        for x_HD, cos_D, sin_D in zip(x_THD.numpy(), cos_TD.numpy(), sin_TD.numpy(), strict=True):
            for x_D in x_HD:
                turned_D = np.concatenate([-x_D[half:], x_D[:half]])
                x_D[:] = x_D * cos_D + turned_D * sin_D

    def silu_mul(self, gate_up_TI: torch.Tensor, out_TI: torch.Tensor) -> None:
        with np.errstate(over="ignore"):  # exp(-gate) = inf below -88, where silu is 0
            for row, out_I in zip(gate_up_TI.numpy(), out_TI.numpy(), strict=True):
                gate_I, up_I = row[: len(out_I)], row[len(out_I) :]
                out_I[:] = gate_I / (1 + np.exp(-gate_I)) * up_I

    def plan_attention(
        self, shape: AttentionShape, spans: Sequence[AttentionSpan], block_size: int
    ) -> ReferencePlan:
        return ReferencePlan(shape, tuple(spans), block_size)

    def write_kv(
        self, plan: ReferencePlan, k_TGD: torch.Tensor, v_TGD: torch.Tensor, kv: KVLayer
    ) -> None:
        for span in plan.spans:
            for i in range(span.num_queries):
                slot = _slot(span, span.position + i, plan.block_size)
                kv.keys[slot] = k_TGD[span.row + i]
                kv.values[slot] = v_TGD[span.row + i]

    def attention(
        self,
        plan: ReferencePlan,
        q_TQD: torch.Tensor,
        kv: KVLayer,
        scale: float,
        out_TQD: torch.Tensor,
    ) -> None:
        # Overflow and NaN are the model's: they may reach the output, but are no reason to warn.
        with np.errstate(over="ignore", invalid="ignore"):
            for span in plan.spans:
                for i in range(span.num_queries):
                    row, position = span.row + i, span.position + i
                    for head in range(plan.shape.num_query_heads):
                        q_D = q_TQD[row, head].numpy() * np.float32(scale)
                        out_D = _attend(plan, span, position, head, q_D, kv)
                        out_TQD[row, head] = torch.from_numpy(out_D)


def _slot(span: AttentionSpan, position: int, block_size: int) -> int:
    block = span.blocks[position // block_size - span.first_block]
    return block * block_size + position % block_size


def _attend(
    plan: ReferencePlan, span: AttentionSpan, position: int, head: int, q_D: Array, kv: KVLayer
) -> Array:
    """One head's attention for one query, over tiles of the keys that it sees."""
    kv_head = head // (plan.shape.num_query_heads // plan.shape.num_kv_heads)
    window = plan.shape.window
    first = 0 if window is None else max(0, position - window + 1)
    maximum, total = np.float32(-np.inf), np.float32(0)
    values_D = np.zeros(plan.shape.head_dim, dtype=np.float32)
    for tile in range(first // _KEY_TILE, position // _KEY_TILE + 1):
        start, stop = max(first, tile * _KEY_TILE), min(position + 1, (tile + 1) * _KEY_TILE)
        slots = [_slot(span, key, plan.block_size) for key in range(start, stop)]
        keys_ND = kv.keys[slots, kv_head].float().numpy()
        values_ND = kv.values[slots, kv_head].float().numpy()

        scores_N = np.add.reduce(keys_ND * q_D, axis=-1)
        new_maximum = np.maximum(maximum, scores_N.max())
        weights_N = np.exp(scores_N - new_maximum)
        keep = np.exp(maximum - new_maximum)
        total = total * keep + np.add.reduce(weights_N)
        values_D = values_D * keep + np.add.reduce(weights_N[:, None] * values_ND, axis=0)
        maximum = new_maximum
    result: Array = values_D / total
    return result
