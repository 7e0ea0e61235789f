"""How much there is of a model: what the machine's limits are divided by."""

from collections import Counter
from math import prod

from eyas import _core
from eyas.loading.checkpoint import open_checkpoint
from eyas.loading.weights import EMBEDDING, HEAD


def model_size(model: str) -> dict[str, int]:
    """``step_weight_bytes``: of the weights that a decode step reads, as they are stored, which are
    all but an embedding table that is not the output head too. ``parameters``: how many values that
    is. ``weight_bytes``: of all. ``max_position``: the longest context in tokens.

    ValueError if the model can't be opened, or if a format has no kernel.
    """
    checkpoint = open_checkpoint(model)
    total = step = parameters = 0
    tensors = checkpoint.weights.takeable()
    has_head = any(tensor.name == HEAD for tensor in tensors)
    for tensor in tensors:
        size = prod(tensor.shape[:-1]) * _core.row_bytes(tensor.format, tensor.shape[-1])
        total += size
        if tensor.name == EMBEDDING and has_head:
            continue
        step += size
        parameters += prod(tensor.shape)
    return {
        "weight_bytes": total,
        "step_weight_bytes": step,
        "parameters": parameters,
        "max_position": int(checkpoint.config["max_position_embeddings"]),
    }


def main_format(model: str) -> str:
    """The format that most of the weights' bytes are stored in. ValueError as above."""
    sizes: Counter[str] = Counter()
    for tensor in open_checkpoint(model).weights.takeable():
        row = _core.row_bytes(tensor.format, tensor.shape[-1])
        sizes[tensor.format] += prod(tensor.shape[:-1]) * row
    return sizes.most_common(1)[0][0]
