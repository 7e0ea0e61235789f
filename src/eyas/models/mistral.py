"""Mistral (Jiang et al. 2023): Llama with a sliding window, where the config has one."""

from typing import Any

from eyas.layers.config import read_dense_config, read_window
from eyas.models.base import Model
from eyas.models.dense import build_dense
from eyas.ops.base import Ops
from eyas.tensors import Weights


def load(config: dict[str, Any], weights: Weights, ops: Ops, owner: str) -> Model:
    """See ModelLoader."""
    if config.get("layer_types"):
        raise ValueError("layer_types is not supported by model type 'mistral'")
    if "sliding_window" not in config:
        # Old and new configs disagree on what an absent key means.
        raise ValueError("the config has no sliding_window: set it to a number or to null")
    dense = read_dense_config(config)
    attention = dense.attention(read_window(config))
    return build_dense(dense, [attention] * dense.num_layers, weights, ops, owner)
