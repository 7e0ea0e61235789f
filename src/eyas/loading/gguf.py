"""GGUF files, versions 2 and 3: a bounded reader of the header, over a mapping of the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Nothing in the file is trusted:
every count is held against the bytes that are left before anything is allocated.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from eyas.loading import quant
from eyas.loading.mapped import MappedFile

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_MAX_NAME = 1024
_MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_SCALAR_SIZES = {kind: struct.calcsize(code) for kind, code in _SCALARS.items()}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table; ``shape`` is in PyTorch order, ``offset`` from the file's
    start."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int


class GGUFFile:
    """A GGUF file's metadata and tensor table.

    ``metadata`` values are int, float, bool, str, list[str], or a NumPy array of numbers.
    """

    def __init__(self, path: Path) -> None:
        self.file = MappedFile(path)
        header = _Header(self.file)
        self.metadata = header.metadata
        self.tensors = header.tensors

    @property
    def path(self) -> Path:
        return self.file.path

    def string(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, str, "a string", default))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, int, "an integer", default))

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, (int, float), "a number", default))
        if not math.isfinite(value):
            raise ValueError(f"{self.path}: metadata {key} is {value}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        return bool(self._get(key, bool, "a boolean", default))

    def strings(self, key: str) -> list[str]:
        return list(self._get(key, list, "an array of strings", None))

    def numbers(self, key: str) -> "np.ndarray[Any, Any]":
        return np.asarray(self._get(key, np.ndarray, "an array of numbers", None))

    def _get(self, key: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ValueError(f"{self.path} lacks the metadata {key}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.path}: metadata {key} should be {what}")
        return value


class _Header:
    """Parses the header once, front to back."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._at = 0
        if file.size < 24 or file.bytes[:4].tobytes() != _MAGIC:
            raise ValueError(f"{file.path} is not a GGUF file")
        self._at = 4
        version = self._scalar("<I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            detail = "is big-endian" if swapped in (2, 3) else f"has GGUF version {version}"
            raise ValueError(f"{file.path} {detail}: only little-endian GGUF 2 and 3 can be read")
        num_tensors = self._count("tensor count", 8 + 4 + 8 + 4 + 8)
        num_metadata = self._count("metadata count", 8 + 4 + 1)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = self._name("a metadata key")
            if key in self.metadata:
                raise ValueError(f"{file.path} has the metadata {key} twice")
            self.metadata[key] = self._value(self._scalar("<I", key), key)
        table = [self._tensor_entry() for _ in range(num_tensors)]
        self.tensors = self._place(table)

    def _place(self, table: list[GGUFTensor]) -> dict[str, GGUFTensor]:
        """Turns offsets into the data into offsets into the file, and checks them all."""
        path = self._file.path
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not (
            8 <= alignment <= _MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        ):
            shown = alignment if type(alignment) is int else f"a {type(alignment).__name__}"
            raise ValueError(f"{path}: general.alignment is {shown}, not a power of two from 8")
        data_start = -(-self._at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        previous, end = "the header", data_start
        for entry in sorted(table, key=lambda t: t.offset):
            start = data_start + entry.offset
            stop = start + quant.size_in_bytes(entry.shape, entry.format)
            if entry.offset % alignment or start < end:
                raise ValueError(
                    f"{path}: tensor {entry.name} at offset {entry.offset} is not aligned to "
                    f"{alignment} bytes or overlaps {previous}"
                )
            if stop > self._file.size:
                raise ValueError(
                    f"{path} is cut short: tensor {entry.name} needs bytes {start} to {stop}, "
                    f"but the file has {self._file.size}"
                )
            if entry.name in placed:
                raise ValueError(f"{path} has the tensor {entry.name} twice")
            placed[entry.name] = GGUFTensor(entry.name, entry.shape, entry.format, start)
            previous, end = entry.name, stop
        return placed

    def _tensor_entry(self) -> GGUFTensor:
        path = self._file.path
        name = self._name("a tensor name")
        num_dims = self._scalar("<I", name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(
                f"{path}: tensor {name} has {num_dims} dimensions, not 1 to {_MAX_DIMS}"
            )
        dims = tuple(self._scalar("<Q", name) for _ in range(num_dims))
        if 0 in dims:
            raise ValueError(f"{path}: tensor {name} has a dimension of 0")
        kind = self._scalar("<I", name)
        offset = self._scalar("<Q", name)
        known = {int(k): k.name for k in gguf.GGMLQuantizationType}
        stored = known.get(kind, f"number {kind}").lower()
        if stored not in quant.FORMATS:
            raise ValueError(
                f"{path}: tensor {name} has the type {stored.upper()}, which cannot be read "
                f"(those that can: {', '.join(f.upper() for f in quant.FORMATS)})"
            )
        shape = dims[::-1]
        try:
            quant.size_in_bytes(shape, stored)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name}: {error}") from error
        return GGUFTensor(name, shape, stored, offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ValueError(f"{self._file.path}: metadata {key} has unknown type {kind}")
        value = self._scalar(_SCALARS[kind], key)
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str) -> Any:
        kind = self._scalar("<I", key)
        if kind == _STRING:
            return [self._string(key) for _ in range(self._count(key, 8))]
        if kind not in _SCALARS:
            raise ValueError(f"{self._file.path}: metadata {key} is an array of type {kind}")
        size = _SCALAR_SIZES[kind]
        count = self._count(key, size)
        raw = self._file.bytes[self._at : self._at + count * size].tobytes()
        self._at += count * size
        return np.frombuffer(raw, dtype=_SCALARS[kind])

    def _name(self, what: str) -> str:
        """A string that errors can quote: the format wants names short and in ASCII."""
        name = self._string(what)
        if not (name.isprintable() and len(name) <= _MAX_NAME):
            raise ValueError(f"{self._file.path} is damaged: {what} is {name[:64]!r}")
        return name

    def _string(self, what: str) -> str:
        length = self._count(what, 1)
        raw = bytes(self._file.buffer[self._at : self._at + length])
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._file.path}: {what} is not valid UTF-8") from error

    def _count(self, what: str, item_size: int) -> int:
        """A 64-bit count of things that take at least ``item_size`` bytes each in the file."""
        count = int(self._scalar("<Q", what))
        if count > (self._file.size - self._at) // item_size:
            raise ValueError(
                f"{self._file.path} is cut short or damaged: {what} claims {count} items, more "
                f"than the {self._file.size - self._at} bytes left can hold"
            )
        return count

    def _scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        if self._at + size > self._file.size:
            raise ValueError(f"{self._file.path} is cut short: it ends within {what}")
        (value,) = struct.unpack_from(code, self._file.buffer, self._at)
        self._at += size
        return value
