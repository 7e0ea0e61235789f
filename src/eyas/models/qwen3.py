"""Qwen 3, dense (Yang et al. 2025): Llama with head norms on q and k; a sliding window in some
layers, where the config asks for it."""

from typing import Any

from eyas.layers.config import read_dense_config, read_flag, read_layer_windows
from eyas.models.base import Model
from eyas.models.dense import build_dense
from eyas.ops.base import Ops
from eyas.tensors import Weights

_DEFAULT_HEAD_DIM = 128  # of transformers' Qwen3Config, whatever the hidden size


def load(config: dict[str, Any], weights: Weights, ops: Ops, owner: str) -> Model:
    """See ModelLoader."""
    dense = read_dense_config(config, _DEFAULT_HEAD_DIM)
    bias = read_flag(config, "attention_bias")
    attentions = [
        dense.attention(window, qkv_bias=bias, output_bias=bias, qk_norm=True)
        for window in read_layer_windows(config, dense.num_layers)
    ]
    return build_dense(dense, attentions, weights, ops, owner)
