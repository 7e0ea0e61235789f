"""A checkpoint held in memory: the Weights protocol over a state dict."""

from collections.abc import Mapping

import torch


class InMemoryTensor:
    """The StoredTensor protocol over a tensor; ``releases`` counts the calls."""

    def __init__(self, tensor: torch.Tensor, name: str = "weight") -> None:
        self.name = name
        self.shape = tuple(tensor.shape)
        self.format = "f32"
        self.releases = 0
        self._tensor = tensor.detach()

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._tensor[start:stop].float()

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
