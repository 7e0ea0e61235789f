"""The attention block."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from eyas.layers.linear import Linear, RowParallelLinear, load_linear, load_row_parallel
from eyas.layers.norm import RMSNorm, load_rms_norm
from eyas.layers.rope import Rope
from eyas.layers.source import Source
from eyas.ops.base import Array, AttentionShape, Handle, Ops, Value
from eyas.parallel import Parallel, split_heads


@dataclass(frozen=True, slots=True)
class AttentionPlace:
    """Where a layer's attention takes place: its group's plan of the step and KV cache, which layer
    of the group it is, the angles of its rope (None: no rope), and the factors of its temperature
    [T, 1] (None: no temperature)."""

    plan: Handle
    kv: Handle
    layer: int
    angles: Value | None
    query_scale: Value | None = None


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Queries grow with their position (Nakanishi 2025, scalable softmax, as Llama 4 has it): by
    1 + ``scale`` log(1 + floor((position + 1) / ``interval``))."""

    interval: int
    scale: float

    def factors(self, positions_T: npt.NDArray[np.int64]) -> Array:
        """[T, 1], computed in float64 and rounded."""
        steps_T = (positions_T + 1) // self.interval
        factors_T = 1 + self.scale * np.log1p(steps_T.astype(np.float64))
        return factors_T.astype(np.float32)[:, None]


def local_shape(shape: AttentionShape, parallel: Parallel) -> AttentionShape:
    """The shape with this rank's heads only."""
    own = split_heads(shape.num_query_heads, shape.num_kv_heads, parallel.size)[parallel.rank]
    return replace(shape, num_query_heads=own.query.size, num_kv_heads=own.kv.size)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention, all ranks' heads together.

    ``qk_norm_eps``: each head of q and k goes through an RMS norm with this epsilon (None: no
    norm); ``unit_norm_eps``: through one without weights, after rope. ``rope`` None leaves
    positions out. ``chunk``: as in KVGroupSpec.
    """

    shape: AttentionShape
    rope: Rope | None
    chunk: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    unit_norm_eps: float | None = None
    temperature: AttentionTemperature | None = None

    def build(self, source: Source, prefix: str, hidden_size: int) -> "Attention":
        """From the checkpoint's ``{prefix}.self_attn.*``."""
        prefix = f"{prefix}.self_attn"
        head_dim, parallel = self.shape.head_dim, source.ops.parallel
        query_size = self.shape.num_query_heads * head_dim
        kv_size = self.shape.num_kv_heads * head_dim
        heads = split_heads(self.shape.num_query_heads, self.shape.num_kv_heads, parallel.size)
        own_query = heads[parallel.rank].query.scaled(head_dim)
        own_kv = heads[parallel.rank].kv.scaled(head_dim)
        qkv_parts = [
            (f"{prefix}.q_proj", query_size),
            (f"{prefix}.k_proj", kv_size),
            (f"{prefix}.v_proj", kv_size),
        ]
        # Old conversions of Llama 1 and 2 store what read_rope computes.
        if source.weights.has(f"{prefix}.rotary_emb.inv_freq"):
            source.weights.take(f"{prefix}.rotary_emb.inv_freq", (head_dim // 2,))
        q_norm = k_norm = None
        if self.qk_norm_eps is not None:
            q_norm = load_rms_norm(source, f"{prefix}.q_norm", head_dim, self.qk_norm_eps)
            k_norm = load_rms_norm(source, f"{prefix}.k_norm", head_dim, self.qk_norm_eps)
        unit_norm = None
        if self.unit_norm_eps is not None:
            unit_norm = RMSNorm(source.ops, torch.ones(head_dim), self.unit_norm_eps)
        return Attention(
            self,
            source.ops,
            qkv=load_linear(
                source, qkv_parts, hidden_size, self.qkv_bias, (own_query, own_kv, own_kv)
            ),
            output=load_row_parallel(
                source,
                source.weights.take(f"{prefix}.o_proj.weight", (hidden_size, query_size)),
                [share.query.scaled(head_dim) for share in heads],
                self.output_bias,
            ),
            q_norm=q_norm,
            k_norm=k_norm,
            unit_norm=unit_norm,
        )


class Attention:
    """qkv, head norms, rope, temperature, attention, output projection: [T, H] -> [T, H]."""

    def __init__(
        self,
        spec: AttentionSpec,
        ops: Ops,
        qkv: Linear,
        output: RowParallelLinear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        unit_norm: RMSNorm | None,
    ) -> None:
        self._ops = ops
        self._qkv = qkv
        self._output = output
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._unit_norm = unit_norm
        self._interleaved = spec.rope is not None and spec.rope.interleaved
        shape = local_shape(spec.shape, ops.parallel)
        self._query_size = shape.num_query_heads * shape.head_dim
        self._kv_size = shape.num_kv_heads * shape.head_dim
        self._scale = spec.shape.head_dim**-0.5

    def __call__(self, x_TH: Value, place: AttentionPlace) -> Value:
        ops = self._ops
        q, k, v = ops.split(self._qkv(x_TH), (self._query_size, self._kv_size, self._kv_size))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        if place.angles is not None:
            q, k = (ops.rope(x, place.angles, self._interleaved) for x in (q, k))
        if self._unit_norm is not None:
            q, k = self._unit_norm(q), self._unit_norm(k)
        if place.query_scale is not None:
            q = ops.scale_rows(q, place.query_scale)
        out = ops.attention(place.plan, place.kv, place.layer, q, k, v, self._scale)
        return self._output(out)
