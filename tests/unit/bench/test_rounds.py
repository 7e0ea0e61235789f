"""Engines take turns; what fails leaves, and idle processes are watched."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from fakes import FakeWorker

from eyas.bench import rounds
from eyas.bench.rounds import ratio, summary, take_turns

Measure = Callable[[Any], dict[str, float]]


def rate(worker: Any) -> dict[str, float]:
    return {"rate": worker.do("x")}


def test_every_round_asks_each_worker_once_and_the_first_round_is_dropped() -> None:
    calls: list[str] = []
    workers = {name: FakeWorker(name, [100, 1, 2], calls) for name in "abc"}
    turns = take_turns(cast(Any, workers), 2, rate)
    assert calls == ["a", "b", "c"] * 3
    assert turns.runs["b"] == [{"rate": 1}, {"rate": 2}]


def test_without_a_warm_up_every_round_counts() -> None:
    turns = take_turns(cast(Any, {"a": FakeWorker("a", [5], [])}), 1, rate, warm_up=False)
    assert turns.runs == {"a": [{"rate": 5}]}


def test_a_worker_that_dies_leaves_and_the_others_go_on() -> None:
    good = FakeWorker("good", [1, 2, 3], [])
    bad = FakeWorker("bad", [1, RuntimeError("no memory")], [])
    workers = {"good": good, "bad": bad}
    turns = take_turns(cast(Any, workers), 2, rate)
    assert list(workers) == ["good"]
    assert bad.closed
    assert turns.failed == {"bad": "no memory"}
    assert turns.runs["good"] == [{"rate": 2}, {"rate": 3}]


def test_work_of_idle_processes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that uses 10 s of processor time whenever another one is asked."""
    monkeypatch.setattr(rounds, "_SETTLE_LIMIT", 0.0)
    busy, asked = FakeWorker("busy", [1], []), FakeWorker("asked", [1], [])
    spent = 0.0

    def work(task: str, **arguments: Any) -> int:
        nonlocal spent
        spent += 10
        return 1

    monkeypatch.setattr(asked, "do", work)
    monkeypatch.setattr(busy, "cpu_seconds", lambda: spent)
    turns = take_turns(cast(Any, {"busy": busy, "asked": asked}), 1, rate, warm_up=False)
    assert turns.busiest_idle > 1


def test_numbers_are_medians_and_all_runs_are_kept() -> None:
    runs = [{"x": 1.0, "y": 9.0}, {"x": 3.0, "y": 7.0}, {"x": 2.0, "y": 8.0}]
    assert summary(runs) == {"x": 2.0, "y": 8.0, "runs": {"x": [1, 3, 2], "y": [9, 7, 8]}}
    assert ratio(runs, [{"x": 1.0}, {"x": 1.0}, {"x": 4.0}], "x") == 1.0
