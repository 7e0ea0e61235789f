"""A checkpoint held in memory: StoredTensor over a tensor or over raw rows, Weights over a dict."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize


class InMemoryTensor:
    """The StoredTensor protocol over a tensor; ``releases`` counts the calls."""

    def __init__(self, tensor: torch.Tensor, name: str = "weight") -> None:
        self.name = name
        self.shape = tuple(tensor.shape)
        self.format = "f32"
        self.releases = 0
        self._tensor = tensor.detach()

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return _finite(self._tensor[start:stop].float(), self.name)

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        values = self._tensor[start:stop].float().contiguous()
        return values.view(torch.uint8).numpy()

    def release(self) -> None:
        self.releases += 1


class RawTensor:
    """The StoredTensor protocol over rows [N, bytes per row] as GGUF stores them in ``format``."""

    def __init__(self, raw: npt.NDArray[np.uint8], format: str, name: str = "weight") -> None:
        self._kind = GGMLQuantizationType[format.upper()]
        inputs, size = GGML_QUANT_SIZES[self._kind]
        self.name = name
        self.shape = (raw.shape[0], raw.shape[1] // size * inputs)
        self.format = format
        self.releases = 0
        self._raw = raw

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        with np.errstate(invalid="ignore"):
            values = dequantize(self._raw[start:stop], self._kind)
        return _finite(torch.from_numpy(np.array(values, np.float32)), self.name)

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        return self._raw[start:stop]

    def release(self) -> None:
        self.releases += 1


class InMemoryWeights:
    """Hands out each tensor once, and complains about those that nobody took."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._left = {name: InMemoryTensor(tensor, name) for name, tensor in state.items()}

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> InMemoryTensor:
        if name not in self._left:
            raise ValueError(f"no tensor {name}")
        tensor = self._left.pop(name)
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tensor.shape}, not {shape}")
        return tensor

    def finish(self) -> None:
        if self._left:
            raise ValueError(f"nobody took {', '.join(self._left)}")


def _finite(values: torch.Tensor, name: str) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name} holds a value that is not finite")
    return values
