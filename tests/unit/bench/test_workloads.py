"""Prompts, and how repeats become numbers beside transformers."""

from typing import Any, cast

from fakes import FakeWorker

from eyas.bench.prompts import random_prompt
from eyas.bench.workloads import _compare


def test_ratios_are_of_pairs_and_the_warm_up_is_dropped() -> None:
    calls: list[str] = []
    eyas = FakeWorker("eyas", [1000, 10, 40, 30], calls)
    peer = FakeWorker("transformers", [1, 10, 20, 10], calls)
    workers = cast(Any, {"eyas": eyas, "transformers": peer})
    result = _compare(workers, 3, lambda worker: float(worker.do("x")))
    assert calls == ["eyas", "transformers"] * 4
    assert result["eyas"] == {"tok_per_s": 30, "runs": {"tok_per_s": [10, 40, 30]}}
    assert result["transformers"]["tok_per_s"] == 10
    assert result["ratio"] == 2  # median of 1, 2 and 3


def test_prompts_repeat_nothing_and_are_the_same_each_time() -> None:
    prompt = random_prompt(16384)
    assert len(set(prompt)) == 16384
    assert prompt == random_prompt(16384)
    assert prompt != random_prompt(16384, seed=1)
