"""The file that keeps quantised weights from one load to the next.

It lies in ``eyas/quantised`` beside the Hub's cache (``~/.cache`` by default), one per source and
scheme, and is a safetensors file: a tensor of bytes per weight, then the CRC-32 of each. It is
written under another name and renamed when complete, so that no reader sees a part of one, and
several processes may write it at once.
"""

import contextlib
import glob
import hashlib
import json
import logging
import os
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from eyas.loading import quant
from eyas.loading.mapped import MappedFile, MappedTensor

logger = logging.getLogger(__name__)

_VERSION = 1  # of this layout and of the rounding: raise it when either changes
_CHECKSUMS = "crc32"
_ABANDONED_SECONDS = 24 * 3600


class CacheFile:
    """Where the cache file of ``tensors`` is and how it must look, whether it exists or not.

    ``formats`` gives the block format of each tensor by name.
    """

    def __init__(
        self, tensors: Sequence[MappedTensor], formats: Mapping[str, str], scheme: str
    ) -> None:
        files = sorted({tensor.file.path.resolve() for tensor in tensors})
        place = _digest([str(file) for file in files], scheme)
        self.path = _folder() / f"{files[0].stem[:40]}-{scheme}-{place[:32]}.safetensors"
        self._tensors: dict[str, tuple[tuple[int, ...], str, int]] = {}  # shape, format, offset
        entries: dict[str, tuple[str, list[int], int]] = {}
        for tensor in tensors:
            size = quant.size_in_bytes(tensor.shape, formats[tensor.name])
            entries[tensor.name] = ("U8", [tensor.shape[0], size // tensor.shape[0]], size)
        entries[_CHECKSUMS] = ("U32", [len(tensors)], 4 * len(tensors))
        metadata = {
            "format": f"eyas {scheme} {_VERSION}",
            "formats": json.dumps(dict(formats)),
            "source": str(files[0]),
            "state": _digest([_state(file) for file in files], scheme),
        }
        self.header, starts = _header(entries, metadata)
        for tensor in tensors:
            placed = (tensor.shape, formats[tensor.name], starts[tensor.name])
            self._tensors[tensor.name] = placed
        self.checksums_start = starts[_CHECKSUMS]
        self.size = self.checksums_start + 4 * len(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str, file: MappedFile) -> MappedTensor:
        shape, format, offset = self._tensors[name]
        return MappedTensor(name, shape, format, file, offset)

    def open(self, num_threads: int) -> dict[str, MappedTensor] | None:
        """The tensors of the file, by name, after a check of every byte of it. None if there is no
        file, or, with a line in the log, if it is stale, damaged or unreadable."""
        if not os.path.exists(self.path):
            return None
        try:
            file = MappedFile(self.path)
        except ValueError as error:
            logger.warning("quantising again: %s", error)
            return None
        if file.size != self.size or file.bytes[: len(self.header)].tobytes() != self.header:
            logger.warning("quantising again: %s is cut short or out of date", self.path)
            return None
        tensors = {name: self.tensor(name, file) for name in self._tensors}
        with ThreadPoolExecutor(num_threads) as pool:
            actual = list(pool.map(_checksum, tensors.values()))
        if file.bytes[self.checksums_start :].tobytes() != _pack(actual):
            logger.warning("quantising again: %s is damaged", self.path)
            return None
        return tensors


class CacheWriter:
    """Writes a cache file. OSError, of any method, if the disk is full or can't be written to.

    A writer that goes away without ``commit`` takes its unfinished file along.
    """

    def __init__(self, cache: CacheFile) -> None:
        self._cache = cache
        self._checksums: dict[str, int] = {}
        folder = cache.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder, cache.path.stem)
        descriptor, name = tempfile.mkstemp(".part", f"{cache.path.stem}.", folder)
        self._part = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        self._discard = weakref.finalize(self, _discard, self._file, self._part)
        try:
            self._file.truncate(cache.size)
            self._file.write(cache.header)
            self._file.flush()
            self._mapped = MappedFile(self._part)
        except (OSError, ValueError) as error:
            self.abandon()
            raise OSError(str(error)) from error

    def add(self, name: str, chunks: Iterable[npt.NDArray[np.uint8]]) -> MappedTensor:
        """Writes the rows of one tensor, and returns them as they lie in the file."""
        tensor = self._cache.tensor(name, self._mapped)
        self._file.seek(tensor.offset)
        checksum = 0
        for rows in chunks:
            checksum = zlib.crc32(rows.data, checksum)
            self._file.write(rows.data)
        self._file.flush()
        assert self._file.tell() == tensor.offset + tensor.nbytes, name
        self._checksums[name] = checksum
        return tensor

    def commit(self) -> None:
        """Puts the complete file in its place."""
        self._file.seek(self._cache.checksums_start)
        self._file.write(_pack([self._checksums[name] for name in self._cache.names()]))
        self._file.close()
        os.replace(self._part, self._cache.path)
        self._discard.detach()

    def abandon(self) -> None:
        """Removes the unfinished file; tensors that were added can be read all the same."""
        self._discard()


def _folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME).parent / "eyas" / "quantised"


def _digest(parts: Sequence[str], scheme: str) -> str:
    return hashlib.sha256(json.dumps([_VERSION, scheme, *parts]).encode()).hexdigest()


def _state(file: Path) -> str:
    """What changes when the file's content does."""
    status = file.stat()
    return f"{file} {status.st_size} {status.st_mtime_ns}"


def _header(
    entries: Mapping[str, tuple[str, list[int], int]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The safetensors header for (type, shape, bytes) by name; and each one's place in the file."""
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    at = 0
    for name, (kind, shape, size) in entries.items():
        content[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        starts[name] = at
        at += size
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _checksum(tensor: MappedTensor) -> int:
    result = zlib.crc32(tensor.raw().data)
    tensor.release()
    return result


def _pack(checksums: Sequence[int]) -> bytes:
    return np.array(checksums, dtype="<u4").tobytes()


def _remove_abandoned(folder: Path, stem: str) -> None:
    """Removes what writers left behind that were killed: a living one's file is never that old."""
    for part in folder.glob(f"{glob.escape(stem)}.*.part"):
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()


def _discard(file: BinaryIO, part: Path) -> None:
    with contextlib.suppress(OSError):  # what is buffered doesn't fit on the disk either
        file.close()
    part.unlink(missing_ok=True)
