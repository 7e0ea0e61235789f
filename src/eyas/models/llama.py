"""Llama 1 to 3 (Touvron et al. 2023; Grattafiori et al. 2024)."""

from typing import Any

from eyas.layers.config import (
    read_dense_config,
    read_flag,
    read_window,
    require_full_attention,
)
from eyas.models.base import Model
from eyas.models.dense import build_dense
from eyas.ops.base import Ops
from eyas.tensors import Weights


def load(config: dict[str, Any], weights: Weights, ops: Ops, owner: str) -> Model:
    """See ModelLoader."""
    dense = read_dense_config(config)
    require_full_attention(config)
    if read_window(config) is not None:
        raise ValueError(
            f"sliding_window {config['sliding_window']} is not supported by model type 'llama': "
            "set it to null, or the model type to 'mistral'"
        )
    bias = read_flag(config, "attention_bias")
    attention = dense.attention(None, qkv_bias=bias, output_bias=bias)
    return build_dense(
        dense,
        [attention] * dense.num_layers,
        weights,
        ops,
        owner,
        mlp_bias=read_flag(config, "mlp_bias"),
    )
