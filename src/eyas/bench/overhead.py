"""``eyas bench overhead``: what a decode step of one request costs beside its kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from eyas.bench.machine import facts
from eyas.bench.model_size import model_size
from eyas.bench.prompts import random_prompt
from eyas.bench.rounds import say
from eyas.bench.worker import Worker

_PROMPT, _OUTPUT = 64, 129


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """``repeats`` timed requests after one to warm up."""

    model: str
    threads: int
    repeats: int


def run(options: OverheadOptions, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Seconds of a step, of its parts, and the share that is not in native programs."""
    result = {"kind": "overhead"} | facts(options.threads)
    say("machine limits")
    with Worker(engine="none") as worker:
        result["limits"] = worker.do("limits", threads=options.threads)
    with Worker(engine="eyas", model=options.model, threads=options.threads) as worker:
        say(f"decoding {_OUTPUT} tokens {options.repeats + 1} times")
        prompt = random_prompt(_PROMPT)
        worker.do("decode", prompt=prompt, num_tokens=8)
        profiles = [
            worker.do("profile", prompt=prompt, num_tokens=_OUTPUT)
            for _ in range(options.repeats + 1)
        ][1:]
    result |= {
        "model": Path(options.model).name,
        "repeats": options.repeats,
        "size": model_size(options.model),
        "prompt_tokens": _PROMPT,
        "output_tokens": _OUTPUT,
    }
    result |= combine(profiles)
    save(result)
    return result


def combine(profiles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians in seconds per step: ``step``, ``native`` (all kernels, barriers included),
    ``sampling`` (the rest of the executor: the batch, sampling, verification), ``engine`` (the rest
    of the step: scheduling, text, outputs), each of ``kernels``; ``overhead`` is the median of the
    share of a step outside native programs."""
    native = [sum(profile["kernels"].values()) for profile in profiles]
    pairs = list(zip(profiles, native, strict=True))
    kinds = profiles[0]["kernels"]
    return {
        "step": median(p["step"] for p in profiles),
        "native": median(native),
        "sampling": median(p["executor"] - n for p, n in pairs),
        "engine": median(p["step"] - p["executor"] for p in profiles),
        "overhead": median(1 - n / p["step"] for p, n in pairs),
        "kernels": {kind: median(p["kernels"][kind] for p in profiles) for kind in kinds},
    }
