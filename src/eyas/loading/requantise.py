"""Quantising a float checkpoint as it loads, and keeping the result for the next time.

Scheme "q8": every matrix as q8_0. "q4": as q4_1, but the embedding and the output head as q8_0.
Matrices whose rows aren't in whole groups of 32, routers, norms and biases stay as stored. Blocks
are those of ``gguf.quants.quantize``, bit for bit.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from eyas import _core
from eyas.loading import quant
from eyas.loading.mapped import MappedTensor
from eyas.loading.quantised_cache import CacheFile, CacheWriter
from eyas.loading.weights import EMBEDDING, HEAD, CheckpointWeights
from eyas.tensors import StoredTensor

logger = logging.getLogger(__name__)

Scheme = Literal["q8", "q4"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
_FORMATS = {"q8": "q8_0", "q4": "q4_1"}
_SENSITIVE = (EMBEDDING, HEAD)  # q8_0 in every scheme
_ROUTER = ".router.weight"  # small, and a wrong expert is no rounding error
_CHUNK_BYTES = 4 << 20  # of float32 rows in memory at once


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A ``StoredTensor`` in ``format`` (q8_0, q4_1) over a float matrix: quantised when read."""

    source: MappedTensor
    format: str
    context: _core.Context

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The values of ``read_raw``, as float32."""
        raw = self.read_raw(start, stop)
        return quant.decode(raw, self.format).reshape(len(raw), self.shape[1])

    def read_raw(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Rows ``start:stop`` as blocks. ValueError naming the tensor for a value that is not
        finite, or that the blocks' float16 scales can't reach."""
        stop = self.shape[0] if stop is None else stop
        size = self.shape[1]
        out = np.empty((stop - start, _core.row_bytes(self.format, size)), np.uint8)
        for first in range(start, stop, self._step):
            values = self.source.read(first, min(first + self._step, stop)).contiguous()
            into = out[first - start : first - start + len(values)]
            if not _core.quantise_rows(
                self.context, self.format, values.data_ptr(), len(values), size, into.ctypes.data
            ):
                raise ValueError(
                    f"tensor {self.name} in {self.source.file.path} holds a value that is too "
                    f"large for {self.format}: load it without quantization"
                )
        return out

    def chunks(self) -> Iterator[npt.NDArray[np.uint8]]:
        """All rows as blocks, some at a time."""
        for first in range(0, self.shape[0], self._step):
            yield self.read_raw(first, min(first + self._step, self.shape[0]))

    def release(self) -> None:
        """Drops the source's pages of this tensor from memory."""
        self.source.release()

    @property
    def _step(self) -> int:
        """Rows to hold as float32 at once."""
        return max(1, _CHUNK_BYTES // (4 * self.shape[1]))


class QuantisedWeights:
    """Implements ``eyas.tensors.Weights`` over a float checkpoint.

    The first load writes each tensor to the cache file as it is taken; later ones map that file
    and don't read the checkpoint's matrices. Where no file can be written, one line says so and
    tensors are quantised as they are read. ValueError for a checkpoint that is quantised already,
    or that has nothing to quantise.
    """

    def __init__(self, source: CheckpointWeights, scheme: Scheme, context: _core.Context) -> None:
        self._source = source
        self._context = context
        self._formats = _choose_formats(source, scheme)
        tensors = [tensor for tensor in source.takeable() if tensor.name in self._formats]
        cache = CacheFile(tensors, self._formats, scheme)
        self._cached = cache.open(context.num_threads)
        self._writer: CacheWriter | None = None
        if self._cached is None:
            self._start(cache)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._source.take(name, shape)
        if name not in self._formats:
            return tensor
        if self._cached is not None:
            return self._cached[name]
        quantised = QuantisedTensor(tensor, self._formats[name], self._context)
        if self._writer is None:
            return quantised
        try:
            written = self._writer.add(name, quantised.chunks())
        except OSError as error:
            self._give_up(error)
            return quantised
        quantised.release()
        return written

    def finish(self) -> None:
        self._source.finish()
        if self._writer is not None:
            try:
                self._writer.commit()
            except OSError as error:
                self._give_up(error)

    def _start(self, cache: CacheFile) -> None:
        try:
            self._writer = CacheWriter(cache)
        except OSError as error:
            self._give_up(error)
        else:
            logger.info("quantising %s into %s", self._source.source, cache.path)

    def _give_up(self, error: OSError) -> None:
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None
        logger.warning(
            "the quantised weights of %s can't be kept for the next time: %s",
            self._source.source,
            error,
        )


def _choose_formats(source: CheckpointWeights, scheme: Scheme) -> dict[str, str]:
    """The block format of each matrix that is to be quantised."""
    formats: dict[str, str] = {}
    left = 0
    for tensor in source.takeable():
        if quant.block_size(tensor.format) > 1:
            raise ValueError(
                f"{source.source} is quantised already ({tensor.name} is stored as "
                f"{tensor.format}): leave quantization out, or give the float checkpoint"
            )
        if len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
            continue
        if tensor.name.endswith(_ROUTER):
            continue
        if tensor.shape[0] == 0 or tensor.shape[1] == 0 or tensor.shape[1] % _core.GROUP:
            left += 1
            continue
        formats[tensor.name] = "q8_0" if tensor.name in _SENSITIVE else _FORMATS[scheme]
    if not formats:
        raise ValueError(
            f"{source.source} holds no matrix with rows in whole groups of {_core.GROUP} values: "
            f"leave quantization out"
        )
    if left:
        logger.warning(
            "%s: %d of %d matrices stay as stored, as their rows aren't in whole groups of %d",
            source.source,
            left,
            left + len(formats),
            _core.GROUP,
        )
    return formats
