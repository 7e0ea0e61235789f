"""Experts that a checkpoint keeps in one tensor, as the matrices of each.

Llama 4's safetensors keep ``experts.gate_up_proj`` [E, H, 2 I], gate first, and
``experts.down_proj`` [E, I, H], with the inputs along the rows, while a linear layer's weight has
them along the columns. GGUF files keep ``experts.gate_proj.weight``, ``up_proj`` [E, I, H] and
``down_proj`` [E, H, I], each expert's matrix as a linear layer has it.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eyas.loading import quant
from eyas.loading.mapped import MappedTensor

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_STACKED = re.compile(r"(.*\.experts)\.((?:gate|up|down)_proj\.weight)")


@dataclass(frozen=True, slots=True)
class TransposedTensor(MappedTensor):
    """The transpose of ``shape[0]`` columns, from ``first_column`` on, of the float matrix
    [shape[1], num_columns] at ``offset``."""

    first_column: int = 0
    num_columns: int = 0

    def raw(self) -> npt.NDArray[np.uint8]:
        """The values' bytes, row by row; a copy."""
        return self.read_raw().reshape(-1)

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        stop = self.num_rows if stop is None else stop
        size = quant.size_in_bytes((1,), self.format)
        unsigned = np.dtype(f"<u{size}")  # floats as bits: only moved, never computed with
        stored = self.file.bytes[self.offset : self.offset + self.shape[1] * self._row_bytes]
        matrix = stored.reshape(self.shape[1], self._row_bytes).view(unsigned)
        columns = matrix[:, self.first_column + start : self.first_column + stop]
        return np.ascontiguousarray(columns.T).view(np.uint8)

    def release(self) -> None:
        """Drops the file's pages of the whole matrix from memory."""
        self.file.release(self.offset, self.offset + self.shape[1] * self._row_bytes)

    def _decode(self, start: int, stop: int) -> torch.Tensor:
        return quant.decode(self.read_raw(start, stop), self.format)

    @property
    def _row_bytes(self) -> int:
        return quant.size_in_bytes((self.num_columns,), self.format)


def split_fused_experts(tensors: list[MappedTensor]) -> list[MappedTensor]:
    """Each fused tensor replaced by ``experts.<number>.gate_proj.weight`` and ``up_proj`` [I, H],
    or ``down_proj`` [H, I], of every expert."""
    split: list[MappedTensor] = []
    for tensor in tensors:
        stacked = _STACKED.fullmatch(tensor.name)
        if stacked is not None and len(tensor.shape) == 3:
            split += _slices(tensor, stacked[1], stacked[2])
            continue
        match = _FUSED.fullmatch(tensor.name)
        if match is None:
            split.append(tensor)
            continue
        if len(tensor.shape) != 3 or (match[2] == "gate_up_proj" and tensor.shape[2] % 2):
            raise ValueError(
                f"tensor {tensor.name} in {tensor.file.path} has shape {list(tensor.shape)}, which "
                f"is none of fused experts"
            )
        experts, parts = match[1], match[2].removesuffix("_proj").split("_")
        for number in range(tensor.shape[0]):
            for place, part in enumerate(parts):
                name = f"{experts}.{number}.{part}_proj.weight"
                split.append(_columns(tensor, name, number, place, len(parts)))
    return split


def _slices(tensor: MappedTensor, experts: str, part: str) -> list[MappedTensor]:
    size = quant.size_in_bytes(tensor.shape[1:], tensor.format)
    return [
        MappedTensor(
            f"{experts}.{number}.{part}",
            tensor.shape[1:],
            tensor.format,
            tensor.file,
            tensor.offset + number * size,
        )
        for number in range(tensor.shape[0])
    ]


def _columns(
    tensor: MappedTensor, name: str, expert: int, place: int, num_parts: int
) -> TransposedTensor:
    _, num_rows, num_columns = tensor.shape
    size = num_columns // num_parts
    return TransposedTensor(
        name=name,
        shape=(size, num_rows),
        format=tensor.format,
        file=tensor.file,
        offset=tensor.offset + expert * quant.size_in_bytes((num_rows, num_columns), tensor.format),
        first_column=place * size,
        num_columns=num_columns,
    )
