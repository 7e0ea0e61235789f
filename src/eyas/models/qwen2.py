"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on q, k and v; a sliding window in some
layers, where the config asks for it."""

from typing import Any

from eyas.layers.config import read_dense_config, read_layer_windows
from eyas.models.base import Model
from eyas.models.dense import build_dense
from eyas.ops.base import Ops
from eyas.tensors import Weights


def load(config: dict[str, Any], weights: Weights, ops: Ops, owner: str) -> Model:
    """See ModelLoader."""
    dense = read_dense_config(config)
    windows = read_layer_windows(config, dense.num_layers)
    attentions = [dense.attention(window, qkv_bias=True) for window in windows]
    return build_dense(dense, attentions, weights, ops, owner)
