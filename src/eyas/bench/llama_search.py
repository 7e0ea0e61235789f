"""llama.cpp at its best for one file: a short search over the settings that a user has."""

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.bench.prompts import random_prompt
from eyas.bench.rounds import say
from eyas.bench.worker import Worker

_START: dict[str, Any] = {
    "flash_attention": "on",
    "repack": True,
    "mmap": True,
    "n_ubatch": 512,
}
# One setting after the other, the best so far kept.
_ALTERNATIVES: tuple[tuple[str, Sequence[Any]], ...] = (
    ("repack", (False,)),
    ("flash_attention", ("off",)),
    ("mmap", (False,)),
    ("n_ubatch", (128, 256)),
)
_GOALS = ("decode", "prefill")


def search(command: Sequence[str], common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was tried: settings, and the best rates of decoding and prefill with each."""
    tried: list[dict[str, Any]] = []

    def measure(settings: dict[str, Any]) -> None:
        if any(one["settings"] == settings for one in tried):
            return
        say(f"llama_cpp: trying {', '.join(f'{k} {v}' for k, v in settings.items())}")
        with Worker(command, **common, **settings) as worker:
            short, long = random_prompt(64), random_prompt(512)
            decode = min(worker.do("decode", prompt=short, num_tokens=48) for _ in range(4))
            prefill = min(worker.do("prefill", prompt=long) for _ in range(3))
        rates = {"decode": 1 / decode, "prefill": 512 / prefill}
        tried.append({"settings": settings, **rates})

    measure(dict(_START))
    for name, values in _ALTERNATIVES:
        for settings in best(tried):
            for value in values:
                measure({**settings, name: value})
    return tried


def best(tried: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings that decode fastest, and those that prefill fastest if they are others."""
    chosen: list[dict[str, Any]] = []
    for goal in _GOALS:
        settings = dict(max(tried, key=lambda one: float(one[goal]))["settings"])
        if settings not in chosen:
            chosen.append(settings)
    return chosen
