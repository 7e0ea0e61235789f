"""A peer's end of the pipe to ``eyas.bench``: tasks in and results out, as lines of JSON.

Standard library only: it runs in a peer's own environment. ``python PEER.py '{"model": ...}'``
loads the model, writes ``{"result": "loaded"}``, and answers each ``{"task": name, ...}`` with the
engine's method of that name; ``{"error": text}`` ends the process. An engine has ``prefill``,
``decode``, ``request`` and ``batch``, as ``eyas.bench.engines.Engine`` describes them,
``generate(prompt, num_tokens)`` for the token ids, and ``facts()`` for versions and settings. Every
task is greedy, runs to its full length whatever ends a text, and computes its prompt anew.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def serve(engine: Callable[..., Any]) -> None:
    """Call ``engine`` with the options from the command line, then answer until input ends. An
    engine's ValueError, TypeError or RuntimeError ends the process."""
    # Results have the original standard output to themselves; what libraries print goes to stderr.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(kind: str, content: Any) -> None:
        print(json.dumps({kind: content}), file=results, flush=True)

    try:
        loaded = engine(**json.loads(sys.argv[1]))
        answer("result", "loaded")
        for line in sys.stdin:
            arguments = json.loads(line)
            task = arguments.pop("task")
            result = peak_memory() if task == "peak_memory" else getattr(loaded, task)(**arguments)
            answer("result", result)
    except (ValueError, TypeError, RuntimeError) as error:
        answer("error", " ".join(str(error).split())[:500])
        sys.exit(1)


def peak_memory() -> int:
    """This process's highest resident memory in bytes, file pages it has mapped included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: peak memory can be measured on Linux only")


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each."""
    return {package: version(package) for package in packages}


def random_tokens(count: int) -> list[int]:
    """A prompt that means nothing, the same every time, of ids that every vocabulary has."""
    return random.Random(1).choices(range(100, 30_000), k=count)


def require(path: str) -> str:
    """``path``. ValueError if nothing is there."""
    if not Path(path).exists():
        raise ValueError(f"no model {path!r}: give the path of a file or directory")
    return path
