"""Speculation settings, and the drafter they name. The file name is the method: no central list."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Literal, cast

import eyas.drafters
from eyas.drafters.base import Drafter
from eyas.models.base import Model
from eyas.ops.base import Ops

_NOT_METHODS = {"base", "registry", "suffix_automaton"}


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """``options`` is the method's own Options; ``num_speculative_tokens`` is K."""

    method: str
    num_speculative_tokens: int
    acceptance: Literal["exact", "rejection"]
    options: Any


def available_methods() -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(eyas.drafters.__path__))
    return sorted(set(names) - _NOT_METHODS)


def parse_speculative_config(config: Mapping[str, Any]) -> SpeculativeOptions:
    """From vLLM's ``speculative_config`` dict. ValueError for an unknown method, key or value."""
    given = dict(config)
    method = given.pop("method", None)
    if method is None:
        if "model" not in given:
            raise ValueError(
                "speculative_config needs 'method' (one of "
                f"{', '.join(available_methods())}) or a draft 'model'"
            )
        method = "draft_model"
    module = _method_module(method)
    count = given.pop("num_speculative_tokens", None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"speculative_config's num_speculative_tokens is {count!r}: "
            "set it to how many tokens to draft per step, 1 or more"
        )
    acceptance = given.pop("acceptance", "exact")
    if acceptance not in ("exact", "rejection"):
        raise ValueError(
            f"speculative_config's acceptance is {acceptance!r}: use 'exact' or 'rejection'"
        )
    known = {field.name for field in fields(module.Options)}
    for key in given:
        if key not in known:
            raise ValueError(
                f"speculative_config has an unknown key {key!r} for method {method!r}: "
                f"known are method, num_speculative_tokens, acceptance, {', '.join(sorted(known))}"
            )
    chosen = {key: value for key, value in given.items() if value is not None}
    return SpeculativeOptions(method, count, acceptance, module.Options(**chosen))


def create_drafter(options: SpeculativeOptions, target: Model, ops: Ops) -> Drafter:
    module = _method_module(options.method)
    return cast(Drafter, module.create(options.options, target, ops, options.acceptance))


def _method_module(method: object) -> ModuleType:
    if method not in available_methods():
        raise ValueError(
            f"speculative method {method!r} is not available: use one of "
            f"{', '.join(available_methods())}"
        )
    return importlib.import_module(f"eyas.drafters.{method}")
