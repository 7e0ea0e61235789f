"""Hugging Face directories: safetensors files, one or many.

Format: https://huggingface.co/docs/safetensors (a length, a JSON header, then the data).
"""

import json
from pathlib import Path
from typing import Any

import safetensors

from eyas.loading import quant
from eyas.loading.mapped import MappedFile, MappedTensor

INDEX_NAME = "model.safetensors.index.json"
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def read_directory(directory: Path) -> list[MappedTensor]:
    """Every tensor of the checkpoint in ``directory``, mapped and not yet read.

    ValueError, naming the file or tensor, for weights that are missing, pickled, damaged, in
    several files at once, or at odds with the index.
    """
    if (directory / INDEX_NAME).is_file():
        return _read_sharded(directory)
    return read_file(_single_file(directory))


def read_file(path: Path) -> list[MappedTensor]:
    """The tensors of one safetensors file."""
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # opening checks the header: sizes, offsets, no gaps, nothing beyond the end
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {_line(error)}") from error
    file = MappedFile(path)
    header_size = int.from_bytes(file.bytes[:8].tobytes(), "little")
    header = json.loads(file.bytes[8 : 8 + header_size].tobytes())
    return [
        _tensor(file, 8 + header_size, name, entry)
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def _tensor(file: MappedFile, data_start: int, name: str, entry: dict[str, Any]) -> MappedTensor:
    if not name.isprintable():
        raise ValueError(f"{file.path} holds a tensor named {name!r}")
    stored = _FORMATS.get(entry["dtype"])
    if stored is None:
        raise ValueError(
            f"tensor {name} in {file.path} has type {entry['dtype']}: only F32, F16 and BF16 "
            f"weights can be loaded"
        )
    shape = tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    size = quant.size_in_bytes(shape, stored)
    if stop - start != size or data_start + stop > file.size:
        raise ValueError(
            f"tensor {name} in {file.path} should be {size} bytes, but the header gives it "
            f"bytes {start} to {stop} of {file.size - data_start}"
        )
    return MappedTensor(name, shape, stored, file, data_start + start)


def _single_file(directory: Path) -> Path:
    files = sorted(directory.glob("*.safetensors"))
    named = directory / "model.safetensors"
    if named in files:
        return named
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(
            f"{directory} has {len(files)} safetensors files but no {INDEX_NAME} that says which "
            f"tensor is where"
        )
    pickled = [
        p.name for s in ("bin", "pt", "pth", "ckpt") for p in sorted(directory.glob(f"*.{s}"))
    ]
    if pickled:
        raise ValueError(
            f"{directory} has only pickled weights ({pickled[0]}), and unpickling can run any "
            f"code: convert them to safetensors"
        )
    ggufs = sorted(directory.glob("*.gguf"))
    hint = f"; to load {ggufs[0].name}, give the path of that file" if ggufs else ""
    raise ValueError(f"{directory} has no .safetensors files{hint}")


def _read_sharded(directory: Path) -> list[MappedTensor]:
    index = directory / INDEX_NAME
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str)
        and Path(shard).name == shard
        and len(shard.encode(errors="replace")) <= 255  # what file systems take
        and (tensor + shard).isprintable()
        for tensor, shard in weight_map.items()
    ):
        raise ValueError(f"{index}: weight_map must map each tensor to a file name in {directory}")
    found: dict[str, MappedTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            raise ValueError(f"{index} names the file {shard}, which is not there")
        for tensor in read_file(directory / shard):
            if tensor.name in found:
                other = found[tensor.name].file.path.name
                raise ValueError(f"tensor {tensor.name} is in two files: {other} and {shard}")
            if weight_map.get(tensor.name) != shard:
                raise ValueError(
                    f"tensor {tensor.name} is in {shard}, but {index} puts it in "
                    f"{weight_map.get(tensor.name, 'no file')}"
                )
            found[tensor.name] = tensor
    missing = sorted(weight_map.keys() - found.keys())
    if missing:
        raise ValueError(
            f"{index} puts tensor {missing[0]} in {weight_map[missing[0]]}, which lacks it"
        )
    return list(found.values())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ValueError naming the file if it can't be read as one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object, but holds a {type(content).__name__}")
    return content


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
