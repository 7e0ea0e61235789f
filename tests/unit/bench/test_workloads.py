"""How repeats become numbers: alternating, the warm-up dropped, the median of the pairs."""

from typing import Any, cast

from eyas.bench.workloads import _alternate, _prompt


class Scripted:
    """Stands for a worker: gives its rates in order and notes who was asked when."""

    def __init__(self, name: str, rates: list[float], calls: list[str]) -> None:
        self.name, self.rates, self.calls = name, iter(rates), calls


def rate(worker: Any) -> float:
    worker.calls.append(worker.name)
    return float(next(worker.rates))


def test_sides_alternate_and_ratios_are_of_pairs() -> None:
    calls: list[str] = []
    eyas = cast(Any, Scripted("eyas", [1000, 10, 40, 30], calls))
    peer = cast(Any, Scripted("peer", [1, 10, 20, 10], calls))
    result = _alternate(eyas, peer, 3, rate)
    assert calls == ["eyas", "peer"] * 4
    assert result["eyas"] == {"tok_per_s": 30, "runs": [10, 40, 30]}
    assert result["transformers"]["tok_per_s"] == 10
    assert result["ratio"] == 2  # median of 1, 2 and 3


def test_prompts_repeat_nothing_and_are_the_same_each_time() -> None:
    prompt = _prompt(1536)
    assert len(set(prompt)) == 1536
    assert prompt == _prompt(1536)
    assert prompt != _prompt(1536, seed=1)
