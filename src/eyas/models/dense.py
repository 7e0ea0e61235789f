"""Dense pre-norm decoders: what the model files of the Llama family share."""

from collections.abc import Iterable

from eyas.layers.attention import AttentionSpec
from eyas.layers.config import DenseConfig
from eyas.layers.layer import PreNormLayerSpec
from eyas.layers.mlp import GatedMLPSpec
from eyas.models.decoder import Decoder, DecoderSpec, build_decoder
from eyas.ops.base import Ops
from eyas.tensors import Weights


def build_dense(
    dense: DenseConfig,
    attentions: Iterable[AttentionSpec],
    weights: Weights,
    ops: Ops,
    owner: str,
    *,
    mlp_bias: bool = False,
) -> Decoder:
    """A decoder with one gated feed-forward layer per attention."""
    mlp = GatedMLPSpec(dense.intermediate_size, mlp_bias)
    spec = DecoderSpec(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        max_position=dense.max_position,
        layers=tuple(PreNormLayerSpec(attention, mlp, dense.norm_eps) for attention in attentions),
        final_norm_eps=dense.norm_eps,
        tied_head=dense.tied_head,
    )
    return build_decoder(spec, weights, ops, owner)
