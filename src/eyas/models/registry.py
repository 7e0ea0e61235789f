"""Finding a model's file: its name is the config's ``model_type``, or its alias."""

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import eyas.models
from eyas.models.base import Model, ModelLoader
from eyas.ops.base import Ops
from eyas.tensors import Weights

_ALIASES = {"llama4_text": "llama4"}


def load_model(config: dict[str, Any], weights: Weights, ops: Ops, owner: str) -> Model:
    """Build the model that ``config`` describes from ``weights``.

    ``owner``, "target" or "draft", says whose KV its groups are. ValueError for an unknown
    ``model_type``, a config that the model can't honour, or weights that are missing or left over.
    """
    model_type = config.get("model_type")
    loader = _find_loader(model_type) if isinstance(model_type, str) else None
    if loader is None:
        raise ValueError(
            f"model_type {model_type!r} is not supported: {', '.join(available_models())} are"
        )
    return loader(config, weights, ops, owner)


def available_models() -> list[str]:
    """Every model_type that has a file here, sorted."""
    names = sorted(module.name for module in pkgutil.iter_modules(eyas.models.__path__))
    return sorted([*_ALIASES, *(name for name in names if _find_loader(name) is not None)])


def _find_loader(model_type: str) -> ModelLoader | None:
    """The ``load`` of the file; None if there is no such file, or it isn't a model's."""
    name = f"eyas.models.{_ALIASES.get(model_type, model_type)}"
    if not model_type.isidentifier() or find_spec(name) is None:
        return None
    loader = getattr(import_module(name), "load", None)
    return None if loader is None else cast(ModelLoader, loader)
