"""Llama 4, its text part (Meta 2025): a mixture of experts; chunked local attention with rope in
most layers, global attention without rope in the others."""

from typing import Any

from eyas.layers.attention import AttentionSpec, AttentionTemperature
from eyas.layers.config import DenseConfig, read_dense_config, read_flag, read_size
from eyas.layers.layer import FeedForwardSpec, PreNormLayerSpec
from eyas.layers.mlp import GatedMLPSpec
from eyas.layers.moe import MoESpec
from eyas.layers.rope import read_rope
from eyas.models.base import Model
from eyas.models.decoder import DecoderSpec, build_decoder
from eyas.ops.base import AttentionShape, Ops, Routing
from eyas.tensors import Weights

# Of transformers' Llama4TextConfig, which are left out of the text_config that it writes.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


def load(config: dict[str, Any], weights: Weights, ops: Ops, owner: str) -> Model:
    """See ModelLoader; ``config`` is the text model's own."""
    dense, layers = read_layers(config)
    spec = DecoderSpec(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        max_position=dense.max_position,
        layers=layers,
        final_norm_eps=dense.norm_eps,
        tied_head=dense.tied_head,
    )
    return build_decoder(spec, weights, ops, owner)


def read_layers(config: dict[str, Any]) -> tuple[DenseConfig, tuple[PreNormLayerSpec, ...]]:
    """The common part of a Llama 4 config, and its layers.

    ValueError naming the key that is missing, malformed or asks for what isn't supported.
    """
    config = {**_DEFAULTS, **config}
    dense = read_dense_config(config)
    ropes = _read_ropes(config, dense.num_layers)
    mixtures = _read_mixtures(config, dense.num_layers)
    local, everywhere = _read_attentions(config, dense)
    moe = _read_moe(config, dense.intermediate_size) if any(mixtures) else None
    mlp = GatedMLPSpec(read_size(config, "intermediate_size_mlp"), name="feed_forward")
    layers = []
    for has_rope, is_mixture in zip(ropes, mixtures, strict=True):
        feed_forward: FeedForwardSpec = moe if is_mixture and moe is not None else mlp
        attention = local if has_rope else everywhere
        layers.append(PreNormLayerSpec(attention, feed_forward, dense.norm_eps))
    return dense, tuple(layers)


def _read_attentions(
    config: dict[str, Any], dense: DenseConfig
) -> tuple[AttentionSpec, AttentionSpec]:
    """The attention of layers with rope, in chunks if there is a chunk size, and that of those
    without."""
    chunk = None
    if config["attention_chunk_size"] is not None:
        chunk = read_size(config, "attention_chunk_size")
    bias = read_flag(config, "attention_bias")
    shape = AttentionShape(dense.num_query_heads, dense.num_kv_heads, dense.head_dim, None)
    with_rope = AttentionSpec(
        shape,
        read_rope(config, dense.head_dim, interleaved=True),
        chunk=chunk,
        qkv_bias=bias,
        output_bias=bias,
        unit_norm_eps=dense.norm_eps if read_flag(config, "use_qk_norm") else None,
    )
    temperature = None
    if read_flag(config, "attn_temperature_tuning"):
        scale = config["attn_scale"]
        if not isinstance(scale, int | float) or not abs(scale) < 1e30:
            raise ValueError(f"attn_scale {scale!r} must be a number, below 1e30")
        temperature = AttentionTemperature(read_size(config, "floor_scale"), float(scale))
    without = AttentionSpec(shape, None, qkv_bias=bias, output_bias=bias, temperature=temperature)
    return with_rope, without


def _read_moe(config: dict[str, Any], intermediate_size: int) -> MoESpec:
    num_experts = read_size(config, "num_local_experts", most=100_000)
    top_k = read_size(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok {top_k} exceeds num_local_experts {num_experts}")
    return MoESpec(num_experts, intermediate_size, Routing(top_k, "sigmoid_input"))


def _read_ropes(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Which layers have rope: those with a 1 in ``no_rope_layers``; without such a list, all but
    every ``no_rope_layer_interval``-th."""
    stored = config.get("no_rope_layers")
    if not stored:
        interval = read_size(config, "no_rope_layer_interval")
        ropes = [number % interval != 0 for number in range(1, num_layers + 1)]
    elif not isinstance(stored, list) or any(entry not in (0, 1) for entry in stored):
        raise ValueError(f"no_rope_layers {str(stored)[:60]} must be a list of 0 and 1")
    elif len(stored) < num_layers:
        raise ValueError(
            f"no_rope_layers has {len(stored)} entries, but num_hidden_layers is {num_layers}"
        )
    else:
        ropes = [bool(entry) for entry in stored[:num_layers]]

    kinds = config.get("layer_types")
    chunked = config["attention_chunk_size"] is not None
    wanted = [
        "chunked_attention" if has_rope and chunked else "full_attention" for has_rope in ropes
    ]
    if kinds is not None and (not isinstance(kinds, list) or kinds[:num_layers] != wanted):
        raise ValueError(
            "layer_types differs from what no_rope_layers and attention_chunk_size say: layers "
            "with rope are 'chunked_attention' if there is a chunk size, all others "
            "'full_attention'"
        )
    return ropes


def _read_mixtures(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Which layers are mixtures of experts: those in ``moe_layers``; without such a list, every
    ``interleave_moe_layer_step``-th."""
    stored = config.get("moe_layers")
    if stored is None:
        step = read_size(config, "interleave_moe_layer_step")
        return [number % step == 0 for number in range(1, num_layers + 1)]
    if not isinstance(stored, list) or not all(
        isinstance(number, int) and number >= 0 for number in stored
    ):
        raise ValueError(f"moe_layers {str(stored)[:60]} must be a list of layer numbers")
    return [number in stored for number in range(num_layers)]
