"""A rank's part of a stored tensor."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eyas.loading import quant
from eyas.parallel import Share
from eyas.tensors import StoredTensor


def shard(
    tensor: StoredTensor, rows: Share | None = None, columns: Share | None = None
) -> StoredTensor:
    """These rows and columns (None: all) of a matrix; columns are cut where its blocks are."""
    num_rows, num_columns = tensor.shape
    rows = rows or Share(0, num_rows)
    columns = columns or Share(0, num_columns)
    if (rows.size, columns.size) == (num_rows, num_columns):
        return tensor
    block = quant.block_size(tensor.format)
    assert columns.start % block == 0, (tensor.name, columns)
    assert columns.stop % block == 0 or columns.stop == num_columns, (tensor.name, columns)
    return Shard(tensor, rows, columns)


@dataclass(frozen=True, slots=True)
class Shard:
    """See ``shard``, which makes these."""

    source: StoredTensor
    rows: Share
    columns: Share

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.size, self.columns.size

    @property
    def format(self) -> str:
        return self.source.format

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See StoredTensor."""
        columns = slice(self.columns.start, self.columns.stop)
        return self.source.read(*self._rows(start, stop))[:, columns]

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """See StoredTensor."""
        raw = self.source.read_raw(*self._rows(start, stop))
        num_columns = self.source.shape[1]
        first = raw.shape[1] * self.columns.start // num_columns
        return raw[:, first : raw.shape[1] * self.columns.stop // num_columns]

    def release(self) -> None:
        """See StoredTensor."""
        self.source.release()

    def _rows(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.rows.size if stop is None else stop
        return self.rows.start + start, self.rows.start + stop
