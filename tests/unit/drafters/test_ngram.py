"""The n-gram drafter against a brute-force search of the same definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafters.base import DraftContext, DraftRequest
from eyas.drafters.ngram import NgramDrafter, Options
from eyas.sampling.rules import SamplingRules
from eyas.sampling.sampler import SampleState


def request(tokens: list[int], max_drafts: int, name: str = "r") -> DraftRequest:
    state = SampleState(SamplingRules(), 0, 0, len(tokens), list(tokens))
    return DraftRequest(name, state, len(tokens), 0, max_drafts, ())


def propose(drafter: NgramDrafter, *requests: DraftRequest) -> list[tuple[int, ...]]:
    return [draft.tokens for draft in drafter.propose(DraftContext(requests, [], 16))]


def brute_force(tokens: list[int], count: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Longest suffix that occurs earlier; its latest earlier occurrence; what followed it, where
    the draft itself is part of the text."""
    for size in range(longest, shortest - 1, -1):
        suffix = tokens[len(tokens) - size :]
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(suffix) == size and tokens[start : start + size] == suffix:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + size + i])
                return tuple(text[len(tokens) :])
    return ()


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    count=st.integers(1, 8),
    shortest=st.integers(1, 3),
    extra=st.integers(0, 2),
    cut=st.integers(1, 40),
)
def test_equals_brute_force_also_when_the_text_grows(tokens, count, shortest, extra, cut) -> None:
    drafter = NgramDrafter(Options(shortest + extra, shortest))
    for length in sorted({min(cut, len(tokens)), len(tokens)}):
        prefix = tokens[:length]
        expected = brute_force(prefix, count, shortest + extra, shortest)
        assert propose(drafter, request(prefix, count)) == [expected]


def test_worked_example() -> None:
    drafter = NgramDrafter(Options(3, 1))
    # "1 2" occurred at the start (followed by 7 8) and later (followed by 9 1).
    assert propose(drafter, request([1, 2, 7, 8, 1, 2, 9, 1, 2], 4)) == [(9, 1, 2, 9)]


def test_requests_are_apart_and_forgotten() -> None:
    drafter = NgramDrafter(Options(2, 1))
    requests = (request([1, 2, 1], 1, "a"), request([3, 4, 5], 1, "b"), request([6, 6], 0, "c"))
    assert propose(drafter, *requests) == [(2,), (), ()]
    drafter.forget(["a", "b", "c", "never seen"])
    assert propose(drafter, request([9, 2, 1], 1, "a")) == [()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"prompt_lookup_max": True}, "prompt_lookup_max is True"),
        ({"prompt_lookup_max": 10**30}, "at most 64"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, r"less than prompt_lookup_min \(3\)"),
    ],
)
def test_bad_options(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)
