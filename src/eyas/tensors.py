"""Stored tensors: what a checkpoint hands to a model, before any kernel has packed it.

The lowest layer of the package: it knows neither file formats (``loading``) nor kernels (``ops``).
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class StoredTensor(Protocol):
    """One tensor in a checkpoint file, memory-mapped and not yet read.

    ``name`` is the Hugging Face name, whatever the file calls it; ``shape`` is the logical shape in
    PyTorch order (a linear weight is [out, in]); ``format`` names the stored encoding ("f32",
    "bf16", "f16", "q4_1", ...).
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start:stop`` of the first axis as float32, at exactly the values stored.

        Raises ValueError naming the tensor when a value is not finite.
        """
        ...

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """The same rows as they are stored: bytes [rows, bytes per row]."""
        ...

    def release(self) -> None:
        """Drop the file's pages of this tensor from memory; reading again is allowed."""
        ...


class Weights(Protocol):
    """A checkpoint's tensors, by Hugging Face name, each accounted for exactly once."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor ``name``; ValueError if it is missing or its shape is not ``shape``."""
        ...

    def finish(self) -> None:
        """ValueError naming every tensor that nobody took: a model that ignores any is wrong."""
        ...
