"""Linear layers."""

from collections.abc import Sequence

import torch

from eyas.layers.source import Source
from eyas.ops.base import Handle, Ops, Value


class Linear:
    """x @ weight.T + bias over a packed weight: [T, K] -> [T, num_outputs]."""

    def __init__(self, ops: Ops, handle: Handle, num_outputs: int) -> None:
        self._ops = ops
        self._handle = handle
        self.num_outputs = num_outputs

    def __call__(self, x_TK: Value) -> Value:
        return self._ops.linear(self._handle, x_TK)


def load_linear(
    source: Source, parts: Sequence[tuple[str, int]], num_inputs: int, bias: bool
) -> Linear:
    """One linear layer from the checkpoint's ``parts``, (name, outputs) each, stacked along the
    outputs; ``bias`` says whether every part has one."""
    weights = [source.weights.take(f"{name}.weight", (size, num_inputs)) for name, size in parts]
    biases = [source.vector(f"{name}.bias", size) for name, size in parts] if bias else None
    handle = source.ops.pack_linear(weights, None if biases is None else torch.cat(biases))
    return Linear(source.ops, handle, sum(size for _, size in parts))
