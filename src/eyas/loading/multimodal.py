"""Llama 4 checkpoints with a vision part: what a text model needs of them."""

import logging
from typing import Any

from eyas.loading.mapped import MappedTensor

logger = logging.getLogger(__name__)

_TEXT = "language_model."
_VISION = ("vision_model.", "multi_modal_projector.")
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "torch_dtype")


def text_part(
    config: dict[str, Any], tensors: list[MappedTensor]
) -> tuple[dict[str, Any], list[MappedTensor]]:
    """The config and the tensors of the text model, under the names of a text-only checkpoint;
    anything else comes back as it is. One line in the log says what was left out.

    ValueError for a config without its text_config.
    """
    if config.get("model_type") != "llama4":
        return config, tensors
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError("the config is of model_type 'llama4', but has no text_config")
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    kept = [tensor for tensor in tensors if not tensor.name.startswith(_VISION)]
    if len(kept) < len(tensors):
        logger.info("%d vision tensors are left out: only text is read", len(tensors) - len(kept))
    return (
        {**shared, **text, "model_type": "llama4_text"},
        [tensor.renamed(tensor.name.removeprefix(_TEXT)) for tensor in kept],
    )
