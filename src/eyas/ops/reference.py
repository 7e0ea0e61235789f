"""ReferenceOps: the slow, obvious twin that the native kernels are tested against.

Each row is computed alone, by numpy on one thread, so that it can't depend on another row, on the
number of rows, or on the number of threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eyas.ops.base import AttentionShape, AttentionSpan, KVCache, KVLayer, KVShape, Routing
from eyas.parallel import SINGLE, Parallel, Share
from eyas.tensors import StoredTensor

Array = npt.NDArray[np.float32]
Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]

_KEY_TILE = 64
_WEIGHT_ROWS = 4096  # bounds the memory of a product's terms


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    gate_up: tuple[ReferenceWeight, ...]
    down: tuple[ReferenceWeight, ...]


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    shape: AttentionShape
    spans: tuple[AttentionSpan, ...]
    block_size: int


class ReferenceOps:
    """The Ops protocol, one row at a time, in float32."""

    name = "reference"

    def __init__(self, parallel: Parallel = SINGLE, exchange: Exchange | None = None) -> None:
        """``exchange`` takes this rank's tensor and returns all ranks', in rank order."""
        assert (exchange is None) == (parallel.size == 1), parallel
        self.parallel = parallel
        self._exchange = exchange

    def single(self) -> "ReferenceOps":
        return ReferenceOps()

    def compile(self, function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
        @torch.inference_mode()
        def run(*arguments: Any) -> Array:
            result: Array = function(
                *(
                    torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                    for value in arguments
                )
            ).numpy()
            return result

        return run

    def pack_linear(
        self, weights: Sequence[StoredTensor], bias: torch.Tensor | None
    ) -> ReferenceWeight:
        weight_NK = torch.cat([weight.read() for weight in weights])
        for weight in weights:
            weight.release()
        return ReferenceWeight(weight_NK, bias)

    def pack_embedding(self, weight: StoredTensor) -> ReferenceWeight:
        return self.pack_linear([weight], None)

    def pack_experts(
        self, gate_up: Sequence[Sequence[StoredTensor]], down: Sequence[StoredTensor]
    ) -> ReferenceExperts:
        return ReferenceExperts(
            tuple(self.pack_linear(weights, None) for weights in gate_up),
            tuple(self.pack_linear([weight], None) for weight in down),
        )

    def allocate_kv(self, shape: KVShape, dtype: torch.dtype) -> KVCache:
        sizes = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        try:
            return KVCache(
                tuple(
                    KVLayer(torch.empty(sizes, dtype=dtype), torch.empty(sizes, dtype=dtype))
                    for _ in range(shape.num_layers)
                )
            )
        except (RuntimeError, TypeError) as error:  # no such memory; no such number
            raise MemoryError from error

    def plan_attention(
        self, shape: AttentionShape, spans: Sequence[AttentionSpan], block_size: int
    ) -> ReferencePlan:
        return ReferencePlan(shape, tuple(spans), block_size)

    def linear(self, handle: ReferenceWeight, x_TK: torch.Tensor) -> torch.Tensor:
        weight = handle.weight_NK.numpy()
        out_TN = torch.empty(len(x_TK), len(weight))
        out = out_TN.numpy()
        # Overflow and NaN are the model's: they may reach the output, but are no reason to warn.
        with np.errstate(over="ignore", invalid="ignore"):
            for t, x_K in enumerate(x_TK.numpy()):
                for start in range(0, len(weight), _WEIGHT_ROWS):
                    rows = slice(start, start + _WEIGHT_ROWS)
                    out[t, rows] = np.add.reduce(weight[rows] * x_K, axis=-1)
                if handle.bias_N is not None:
                    out[t] += handle.bias_N.numpy()
        return out_TN

    def embed(self, handle: ReferenceWeight, ids_T: torch.Tensor, first: int = 0) -> torch.Tensor:
        table = handle.weight_NK
        nothing = torch.zeros(table.shape[1])
        places = [token_id - first for token_id in ids_T.tolist()]
        return torch.stack([table[i] if 0 <= i < len(table) else nothing for i in places])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = [x] if self._exchange is None else self._exchange(x)
        for other in others:
            total = total + other
        return total

    def all_gather(self, x: torch.Tensor, shares: Sequence[Share]) -> torch.Tensor:
        parts = [x] if self._exchange is None else self._exchange(x)
        assert [part.shape[1] for part in parts] == [share.size for share in shares]
        return torch.cat([*parts], dim=1)

    def split(self, x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(part.contiguous() for part in torch.split_with_sizes(x, list(widths), dim=1))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def concat(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*values], dim=1)

    def scale_rows(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        runs = zip(
            x.numpy().reshape(-1, len(weight)), out.numpy().reshape(-1, len(weight)), strict=True
        )
        with np.errstate(over="ignore", invalid="ignore"):
            for x_H, out_H in runs:
                out_H[:] = x_H / np.sqrt(np.mean(x_H * x_H) + np.float32(eps)) * weight.numpy()
        return out

    def angles(
        self, inv_freq: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [T, D / 2], taken in float64 and rounded."""
        positions = positions_T.numpy().astype(np.float32)[:, None]
        angles = (positions * inv_freq.numpy()).astype(np.float64)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return torch.from_numpy(cos), torch.from_numpy(sin)

    def rope(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        interleaved: bool = False,
    ) -> torch.Tensor:
        out = x.clone()
        half = angles[0].shape[1]
        rows = zip(out.numpy(), angles[0].numpy(), angles[1].numpy(), strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for row, cos, sin in rows:
                for head in row.reshape(-1, 2 * half):
                    pairs = head.reshape(half, 2).T if interleaved else head.reshape(2, half)
                    first, second = pairs.copy()
                    pairs[0] = first * cos - second * sin
                    pairs[1] = second * cos + first * sin
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        with np.errstate(over="ignore", invalid="ignore"):  # exp(-gate) = inf below -88
            for row, out_I in zip(gate_up.numpy(), out.numpy(), strict=True):
                gate_I, up_I = row[: len(out_I)], row[len(out_I) :]
                out_I[:] = gate_I / (1 + np.exp(-gate_I)) * up_I
        return out

    def moe(
        self,
        handle: ReferenceExperts,
        x: torch.Tensor,
        scores: torch.Tensor,
        routing: Routing,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        with np.errstate(over="ignore", invalid="ignore"):
            for x_H, scores_E, out_H in zip(x.numpy(), scores.numpy(), out.numpy(), strict=True):
                for i, (expert, weight) in enumerate(route(scores_E, routing)):
                    into = routing.kind == "sigmoid_input"
                    x_1H = torch.from_numpy((x_H * weight if into else x_H)[None])
                    gated = self.silu_mul(self.linear(handle.gate_up[expert], x_1H))
                    result_H = self.linear(handle.down[expert], gated).numpy()[0]
                    result_H = result_H if into else result_H * weight
                    out_H[:] = out_H + result_H if i else result_H
        return out

    def attention(
        self,
        plan: ReferencePlan,
        kv: KVCache,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        shape, cache = plan.shape, kv.layers[layer]
        heads = (len(q), -1, shape.head_dim)
        q_TQD, k_TGD, v_TGD = q.view(heads), k.view(heads), v.view(heads)
        out_TQD = torch.empty_like(q_TQD)
        for span in plan.spans:
            for i in range(span.num_queries):
                place = _slot(span, span.position + i, plan.block_size)
                cache.keys[place] = k_TGD[span.row + i].to(cache.keys.dtype)
                cache.values[place] = v_TGD[span.row + i].to(cache.values.dtype)
        # Overflow and NaN are the model's: they may reach the output, but are no reason to warn.
        with np.errstate(over="ignore", invalid="ignore"):
            for span in plan.spans:
                for i in range(span.num_queries):
                    row, position = span.row + i, span.position + i
                    for head in range(shape.num_query_heads):
                        q_D = q_TQD[row, head].numpy() * np.float32(scale)
                        out_D = _attend(plan, span, position, head, q_D, cache)
                        out_TQD[row, head] = torch.from_numpy(out_D)
        return out_TQD.view(q.shape)


def route(scores_E: Array, routing: Routing) -> list[tuple[int, np.float32]]:
    """A row's experts, ascending, and their weights, taken in float64 and rounded."""
    if np.isnan(scores_E).any():
        return [(expert, np.float32(np.nan)) for expert in range(routing.top_k)]
    best = np.argsort(-scores_E, kind="stable")[: routing.top_k]
    experts = sorted(best.tolist())
    wide = scores_E.astype(np.float64)
    if routing.kind == "sigmoid_input":
        weights = 1 / (1 + np.exp(-wide[experts]))
    else:
        powers = np.exp(wide - wide.max())
        weights = powers[experts] / powers[experts if routing.normalise else ...].sum()
    return list(zip(experts, weights.astype(np.float32), strict=True))


def quantise(x: Array) -> tuple[npt.NDArray[np.int8], Array]:
    """One row [K] as int8 kernels see it: q [K] and the scale [K / 32] of each group of 32, with x
    about scale * q. The scale is max |x| / 127, so q lies in -127 .. 127; it is 0 in a group whose
    values are all below 1e-35, where 127 / max |x| could overflow."""
    groups = x.reshape(-1, 32)
    limit = np.abs(groups).max(axis=1)
    inverse = np.float32(127) / np.where(limit < np.float32(1e-35), np.float32(np.inf), limit)
    q = np.rint(groups * inverse[:, None]).astype(np.int8)
    return q.reshape(-1), limit / np.float32(127)


def _slot(span: AttentionSpan, position: int, block_size: int) -> tuple[int, int]:
    return span.blocks[position // block_size - span.first_block], position % block_size


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
        blocks, offsets = [list(part) for part in zip(*slots, strict=True)]
        keys_ND = kv.keys[blocks, offsets, kv_head].float().numpy()
        values_ND = kv.values[blocks, offsets, kv_head].float().numpy()

        scores_N = np.add.reduce(keys_ND * q_D, axis=-1)
        new_maximum = np.maximum(maximum, scores_N.max())
        weights_N = np.exp(scores_N - new_maximum)
        keep = np.exp(maximum - new_maximum)
        total = total * keep + np.add.reduce(weights_N)
        values_D = values_D * keep + np.add.reduce(weights_N[:, None] * values_ND, axis=0)
        maximum = new_maximum
    result: Array = values_D / total
    return result
