"""The kernels' shapes in two models, and weights of those shapes that nobody trained."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eyas import _core
from eyas.ops.base import AttentionShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``linear``: outputs and inputs of each layer, by what it computes."""

    linear: dict[str, tuple[int, int]]
    attention: AttentionShape
    hidden_size: int
    intermediate_size: int


def _dense(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
) -> ModelShape:
    linear = {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "attention_out": (hidden, heads * head_dim),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
        "head": (vocabulary, hidden),
    }
    attention = AttentionShape(heads, kv_heads, head_dim, None)
    return ModelShape(linear, attention, hidden, intermediate)


SHAPES = {
    "demo": _dense(576, 1536, 9, 3, 64, 49_152),
    "llama-3.2-1b": _dense(2048, 8192, 32, 8, 64, 128_256),
}


class RandomWeight:
    """The StoredTensor protocol over random bytes in ``format``.

    Bytes are between 0x20 and 0x3b, so that every scale and every float among them is finite,
    positive and neither tiny nor subnormal, which would change the time that arithmetic takes.
    """

    def __init__(self, num_outputs: int, num_inputs: int, format: str) -> None:
        self.name = "random"
        self.shape = (num_outputs, num_inputs)
        self.format = format
        size = (num_outputs, _core.row_bytes(format, num_inputs))
        self._raw = np.random.default_rng(0).integers(0x20, 0x3C, size, np.uint8)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        raise AssertionError("random weights are packed as they are")

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        return self._raw[start:stop]

    def release(self) -> None:
        """Nothing to release: there is no file."""
