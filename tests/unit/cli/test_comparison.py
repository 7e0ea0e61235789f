"""The comparison behind ``eyas verify`` and ``eyas demo``: it sees one bit."""

import math
from dataclasses import dataclass
from typing import Any

from eyas.cli.comparison import Comparison, bits


@dataclass
class Value:
    logprob: float


@dataclass
class Sample:
    token_ids: list[int]
    logprobs: list[dict[int, Value]]


@dataclass
class Output:
    outputs: list[Sample]


def output(*tokens: tuple[int, float]) -> Any:
    return Output([Sample([t for t, _ in tokens], [{t: Value(p)} for t, p in tokens])])


def compare(left: Any, right: Any) -> Comparison:
    comparison = Comparison()
    comparison.add("mix", [left], [right])
    return comparison


def test_equal_outputs_are_counted() -> None:
    same = compare(output((1, -0.5), (2, -1.5)), output((1, -0.5), (2, -1.5)))
    assert (same.num_tokens, same.num_logprobs, same.differences) == (2, 2, [])


def test_one_bit_of_one_logprob_is_seen() -> None:
    changed = compare(output((1, -0.5)), output((1, math.nextafter(-0.5, 0))))
    assert changed.differences == [
        "mix, request 1, token 0 (1): log-probability of 1: -0.5 became -0.49999999999999994"
    ]


def test_the_first_differing_token_is_named() -> None:
    changed = compare(output((1, -1.0), (2, -1.0), (3, -1.0)), output((1, -1.0), (7, -1.0)))
    assert changed.differences == ["mix, request 1, token 1: token 2 became token 7"]


def test_a_shorter_output_differs() -> None:
    changed = compare(output((1, -1.0), (2, -1.0)), output((1, -1.0)))
    assert changed.differences == ["mix, request 1, token 1: token 2 became the end"]


def test_bits_tell_zeros_apart_and_nan_from_nothing() -> None:
    assert bits(0.0) != bits(-0.0)
    assert bits(math.nan) == bits(math.nan)
