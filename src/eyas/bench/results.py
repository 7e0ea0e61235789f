"""Result files: their names, and going on where an interrupted run stopped."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What two runs must have in common for their numbers to stand in one file.
_SAME = ("kind", "model", "commit", "machine", "threads", "versions", "repeats", "hot")


def file_name(kind: str, model: str | None, format: str, cores: int) -> str:
    """``demo-2-cores.json`` for the workloads beside transformers, else ``KIND-MODEL-...``; a peer
    run has the weights' format in its name, as it is one of several on the same model."""
    parts = [] if kind == "workloads" else [kind]
    if model is not None:
        name = Path(model).stem.lower() if model.endswith(".gguf") else Path(model).name
        parts.append(name)
        if kind == "peers" and format not in name:
            parts.append(format)
    return f"{'-'.join(parts)}-{cores}-cores.json"


def write(path: Path, result: Mapping[str, Any]) -> None:
    """The whole file or nothing new."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.rename(path)


def read_earlier(path: Path, expected: Mapping[str, Any]) -> dict[str, Any] | None:
    """An earlier run's result, if there is one. ValueError if it was measured with other software,
    settings or hardware than ``expected`` says."""
    if not path.exists():
        return None
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name in _SAME:
        if name in expected and earlier.get(name) != expected[name]:
            raise ValueError(
                f"{path} can't be resumed, its {name} is another: remove it, or leave out --resume"
            )
    return earlier
