"""The attention block."""

from dataclasses import dataclass

import torch

from eyas.layers.linear import Linear, load_linear
from eyas.layers.norm import RMSNorm, load_rms_norm
from eyas.layers.rope import Rope
from eyas.layers.source import Source
from eyas.ops.base import AttentionShape, Handle, KVLayer, Ops

Angles = tuple[torch.Tensor, torch.Tensor]  # cos, sin of a forward's positions, [T, D] each


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention.

    ``qk_norm_eps``: each head of q and k goes through an RMS norm with this epsilon (None: no
    norm). ``rope`` None leaves positions out.
    """

    shape: AttentionShape
    rope: Rope | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None

    def build(self, source: Source, prefix: str, hidden_size: int) -> "Attention":
        """From the checkpoint's ``{prefix}.self_attn.*``."""
        prefix = f"{prefix}.self_attn"
        head_dim = self.shape.head_dim
        query_size = self.shape.num_query_heads * head_dim
        kv_size = self.shape.num_kv_heads * head_dim
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
        return Attention(
            self,
            source.ops,
            qkv=load_linear(source, qkv_parts, hidden_size, self.qkv_bias),
            output=load_linear(
                source, [(f"{prefix}.o_proj", hidden_size)], query_size, self.output_bias
            ),
            q_norm=q_norm,
            k_norm=k_norm,
        )


class Attention:
    """qkv, head norms, rope, KV write, attention, output projection: [T, H] -> [T, H]."""

    def __init__(
        self,
        spec: AttentionSpec,
        ops: Ops,
        qkv: Linear,
        output: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        self._ops = ops
        self._qkv = qkv
        self._output = output
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._head_dim = spec.shape.head_dim
        self._query_size = spec.shape.num_query_heads * spec.shape.head_dim
        self._kv_size = spec.shape.num_kv_heads * spec.shape.head_dim
        self._scale = spec.shape.head_dim**-0.5

    def __call__(
        self, x_TH: torch.Tensor, plan: Handle, kv: KVLayer, angles: Angles | None
    ) -> torch.Tensor:
        """``angles`` None: no rope. Writes the tokens' keys and values to ``kv``."""
        sizes = (self._query_size, self._kv_size, self._kv_size)
        q_TQD, k_TGD, v_TGD = (
            part.contiguous().view(len(x_TH), -1, self._head_dim)
            for part in torch.split_with_sizes(self._qkv(x_TH), sizes, dim=1)
        )
        if self._q_norm is not None and self._k_norm is not None:
            q_TQD, k_TGD = self._q_norm(q_TQD), self._k_norm(k_TGD)
        if angles is not None:
            self._ops.rope(q_TQD, *angles)
            self._ops.rope(k_TGD, *angles)
        self._ops.write_kv(plan, k_TGD, v_TGD, kv)
        out_TQD = torch.empty_like(q_TQD)
        self._ops.attention(plan, q_TQD, kv, self._scale, out_TQD)
        return self._output(out_TQD.view(len(x_TH), self._query_size))
