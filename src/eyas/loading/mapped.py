"""Tensors in memory-mapped files, whatever the container."""

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from eyas.loading import quant


class MappedFile:
    """A read-only mapping of a whole file. ValueError if there is nothing to map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"cannot open {path}: {error.strerror or error}") from error
        except ValueError as error:  # mmap refuses an empty file
            raise ValueError(f"{path} is empty") from error
        self.buffer = memoryview(self._map)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def size(self) -> int:
        return len(self.bytes)

    def release(self, start: int, stop: int) -> None:
        """Drops the pages that hold bytes ``start:stop``; a later read brings them back."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A ``StoredTensor`` at ``offset`` in ``file``.

    ``rope_heads`` is not None for a query or key projection with that many heads whose rows are
    stored interleaved (GGUF's llama architecture): row 2i + s of a head is row i of half s in the
    Hugging Face layout, which is what ``read`` returns.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    file: MappedFile
    offset: int
    rope_heads: int | None = None

    def renamed(self, name: str) -> "MappedTensor":
        return replace(self, name=name)

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return quant.size_in_bytes(self.shape, self.format)

    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, without a copy."""
        return self.file.bytes[self.offset : self.offset + self.nbytes]

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start:stop`` as float32. ValueError naming the tensor if a value isn't finite."""
        stop = self.num_rows if stop is None else stop
        assert 0 <= start <= stop <= self.num_rows, (self.name, start, stop, self.shape)
        values = self._decode(start, stop).reshape(
            (stop - start, *self.shape[1:])[: len(self.shape)]
        )
        # A finite sum has finite terms, and is quicker to get; an overflowing one proves nothing.
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            raise ValueError(
                f"tensor {self.name} in {self.file.path} holds a value that is not finite "
                f"(in rows {start} to {stop - 1}): the checkpoint is damaged"
            )
        return values

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Rows ``start:stop`` as stored, in the Hugging Face order; a copy if that differs."""
        assert len(self.shape) > 1, (self.name, self.shape)
        stop = self.num_rows if stop is None else stop
        rows = self.raw().reshape(self.num_rows, -1)
        return rows[start:stop] if self.rope_heads is None else rows[self._stored_rows(start, stop)]

    def release(self) -> None:
        """Drops the file's pages of this tensor from memory."""
        self.file.release(self.offset, self.offset + self.nbytes)

    def _decode(self, start: int, stop: int) -> torch.Tensor:
        if len(self.shape) == 1 and quant.block_size(self.format) > 1:
            # Blocks of a vector span its rows: decode whole blocks, then cut.
            return quant.decode(self.raw().reshape(1, -1), self.format)[start:stop]
        rows = self.raw().reshape(self.num_rows, -1) if self.nbytes else self.raw().reshape(0, 0)
        if self.rope_heads is None:
            return quant.decode(rows[start:stop], self.format)
        return quant.decode(rows[self._stored_rows(start, stop)], self.format)

    def _stored_rows(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where the file keeps the rows ``start:stop`` of the Hugging Face layout."""
        assert self.rope_heads is not None
        head_dim = self.num_rows // self.rope_heads
        row = np.arange(start, stop)
        head, inner = row // head_dim, row % head_dim
        half, pair = inner // (head_dim // 2), inner % (head_dim // 2)
        return head * head_dim + 2 * pair + half
