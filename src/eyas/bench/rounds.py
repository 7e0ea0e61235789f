"""Taking turns: repeat i of every engine runs beside repeat i of the others, and nothing else."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eyas.bench.worker import Worker

Rates = Mapping[str, float]  # one run's numbers, by name

# Libraries' threads spin for a while after their last task (up to 200 ms by default).
_SETTLE_STEP, _SETTLE_LIMIT = 0.1, 3.0
_IDLE_SHARE = 0.15  # of one core, over a step: the clock of processor time ticks each 10 ms


@dataclass(slots=True)
class Turns:
    """What the rounds of one workload gave. ``busiest_idle`` is the greatest share of a core that
    the processes whose turn it wasn't used together."""

    runs: dict[str, list[Rates]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    busiest_idle: float = 0.0


def take_turns(
    workers: dict[str, Worker],
    repeats: int,
    measure: Callable[[Worker], Rates],
    warm_up: bool = True,
) -> Turns:
    """``measure`` of each worker in each round; the first round warms up and is not counted. A
    worker that dies, or can't do this, leaves ``workers``."""
    turns = Turns()
    for number in range(repeats + warm_up):
        for name in list(workers):
            others = [worker for other, worker in workers.items() if other != name]
            _settle(others)
            before, started = _cpu_seconds(others), time.perf_counter()
            try:
                rates = measure(workers[name])
            except RuntimeError as error:
                turns.failed[name] = str(error)
                say(f"{name} failed: {error}")
                workers.pop(name).close()
                continue
            used = _cpu_seconds(others) - before
            share = max(0.0, used - 0.02) / (time.perf_counter() - started)
            turns.busiest_idle = max(turns.busiest_idle, share)
            if number >= warm_up:
                turns.runs.setdefault(name, []).append(rates)
    return turns


def summary(runs: Sequence[Rates]) -> dict[str, Any]:
    """The median of each number, and all of them under ``runs``."""
    names = list(runs[0])
    columns = {name: [run[name] for run in runs] for name in names}
    return {name: median(column) for name, column in columns.items()} | {"runs": columns}


def ratio(ours: Sequence[Rates], theirs: Sequence[Rates], name: str) -> float:
    """The median of the rounds' ratios."""
    return median(a[name] / b[name] for a, b in zip(ours, theirs, strict=True))


def say(text: str) -> None:
    """A line of progress."""
    print(f"bench: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _settle(others: Sequence[Worker]) -> None:
    """Wait until the others do nothing, but not for ever."""
    end = time.perf_counter() + _SETTLE_LIMIT
    while others and time.perf_counter() < end:
        before = _cpu_seconds(others)
        time.sleep(_SETTLE_STEP)
        if _cpu_seconds(others) - before <= _IDLE_SHARE * _SETTLE_STEP:
            return


def _cpu_seconds(workers: Sequence[Worker]) -> float:
    return sum(worker.cpu_seconds() for worker in workers)
