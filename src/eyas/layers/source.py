"""What a layer is built from."""

from dataclasses import dataclass

import torch

from eyas.ops.base import Ops
from eyas.tensors import Weights


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's weights, and the ops that pack and run them."""

    weights: Weights
    ops: Ops

    def vector(self, name: str, size: int) -> torch.Tensor:
        """The [size] tensor ``name`` in float32: a bias or a norm's weight."""
        stored = self.weights.take(name, (size,))
        vector = stored.read().contiguous()
        stored.release()
        return vector
