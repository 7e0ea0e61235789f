"""The suffix drafter and its automaton against brute-force search of the same definitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafters.base import DraftContext, DraftRequest
from eyas.drafters.suffix import Options, SuffixDrafter
from eyas.drafters.suffix_automaton import SuffixAutomaton
from eyas.sampling.rules import SamplingRules
from eyas.sampling.sampler import SampleState

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def occurrences(text: list[int], piece: list[int]) -> list[int]:
    """Where ``piece`` ends in ``text``: the position after its last token."""
    size = len(piece)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == piece]


def followers(text: list[int], piece: list[int]) -> set[int]:
    return {text[end] for end in occurrences(text, piece) if end < len(text)}


def request(
    tokens: list[int], max_drafts: int, name: str = "r", prompt: int | None = None
) -> DraftRequest:
    length = len(tokens) if prompt is None else prompt
    state = SampleState(SamplingRules(), 0, 0, length, list(tokens))
    return DraftRequest(name, state, len(tokens), 0, max_drafts, ())


def propose(drafter: SuffixDrafter, *requests: DraftRequest) -> list[tuple[int, ...]]:
    return [draft.tokens for draft in drafter.propose(DraftContext(requests, [], 16))]


@given(text=texts)
def test_the_longest_repeated_suffix_and_what_followed_it(text) -> None:
    automaton = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        automaton.extend(text[end - 1 : end])
        so_far = text[:end]
        sizes = [
            size for size in range(end) if len(occurrences(so_far, so_far[end - size : end])) > 1
        ]
        state, match = automaton.repeated()
        assert match == max(sizes)
        suffix = so_far[end - match : end]
        assert set(automaton._next[state]) == followers(so_far, suffix)
    assert len(automaton._length) <= 2 * len(text) + 1


@given(pieces=st.lists(texts, min_size=1, max_size=4), tail=texts)
def test_the_longest_suffix_that_occurs_in_one_of_several_texts(pieces, tail) -> None:
    automaton = SuffixAutomaton()
    for piece in pieces:
        automaton.separate()
        automaton.extend(piece)

    def following(size: int) -> set[int]:
        suffix = tail[len(tail) - size :]
        return set().union(*(followers(piece, suffix) for piece in pieces))

    sizes = [
        size
        for size in range(len(tail) + 1)
        if any(occurrences(piece, tail[len(tail) - size :]) for piece in pieces)
    ]
    state, match = automaton.find(tail)
    assert match == max(sizes)
    assert set(automaton._next[state]) == following(match)


@given(text=texts, limit=st.integers(1, 12), factor=st.sampled_from([0.5, 1.0, 3.0]))
def test_a_draft_is_a_path_of_the_text_and_as_long_as_its_match_deserves(
    text, limit, factor
) -> None:
    options = Options(suffix_decoding_max_spec_factor=factor, suffix_decoding_min_token_prob=0.0)
    [draft] = propose(SuffixDrafter(options), request(text, limit))
    match = SuffixAutomaton()
    match.extend(text)
    _, size = match.repeated()
    assert len(draft) <= min(limit, int(factor * size))
    if draft:
        assert draft[0] in followers(text, text[len(text) - size :])
    context = [*text]
    for token in draft:  # each token has followed at least the one before it
        assert token in followers(text, context[-1:])
        context.append(token)


def test_what_follows_most_often_wins() -> None:
    # "1 2" was followed by 7, then by 8 twice.
    drafter = SuffixDrafter(Options())
    assert propose(drafter, request([1, 2, 7, 1, 2, 8, 1, 2, 8, 5, 1, 2], 1)) == [(8,)]


def test_a_longer_match_drafts_more() -> None:
    passage = [11, 12, 13, 14, 15, 16, 17, 18]
    drafter = SuffixDrafter(Options())
    assert propose(
        drafter,
        request([*passage, 1, 11], 8, "a"),
        request([*passage, 1, 11, 12, 13], 8, "b"),
        request([*passage, 1, 2], 8, "c"),
    ) == [(12,), (14, 15, 16), ()]


def test_an_ambiguous_future_ends_the_draft() -> None:
    text = [9, 1, 9, 2, 9, 3, 9, 4, 9]  # after 9, four tokens of frequency 1/4
    assert propose(
        SuffixDrafter(Options(suffix_decoding_min_token_prob=0.3)), request(text, 4)
    ) == [()]
    assert propose(
        SuffixDrafter(Options(suffix_decoding_min_token_prob=0.2)), request(text, 4)
    ) == [(4,)]


def test_repetition_goes_on_into_the_draft() -> None:
    assert propose(SuffixDrafter(Options()), request([1, 2] * 10, 8)) == [(1, 2) * 4]
    assert propose(SuffixDrafter(Options()), request([5] * 3000, 6)) == [(5,) * 6]


def test_earlier_outputs_draft_if_asked_and_never_the_prompts() -> None:
    for cached, expected in ((0, ()), (1, (6, 7, 8))):
        drafter = SuffixDrafter(Options(suffix_decoding_max_cached_requests=cached))
        first = request([40, 41, 42, 43, 3, 4, 5, 6, 7, 8], 4, "a", prompt=4)
        propose(drafter, first)
        drafter.forget(["a"])
        assert propose(drafter, request([90, 3, 4, 5], 4, "b")) == [expected]
        assert propose(drafter, request([90, 40, 41, 42], 4, "c")) == [()]


def test_earlier_outputs_are_bounded_and_the_oldest_go_first() -> None:
    drafter = SuffixDrafter(Options(suffix_decoding_max_cached_requests=4))
    outputs = [[1000 * (i + 1) + j for j in range(6)] for i in range(7)]
    for i, output in enumerate(outputs):
        propose(drafter, request([1, *output], 1, f"r{i}", prompt=1))
        drafter.forget([f"r{i}"])
    found = [
        propose(drafter, request([2, *output[:3]], 2, f"p{i}")) == [tuple(output[3:5])]
        for i, output in enumerate(outputs)
    ]
    assert found == [False, False, False, False, True, True, True]


def test_follows_a_request_that_begins_again() -> None:
    drafter = SuffixDrafter(Options())
    propose(drafter, request([1, 2, 3, 1], 2))
    drafter.forget(["r"])
    assert propose(drafter, request([8, 9, 8], 2)) == [(9,)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_tree_depth", True),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_max_spec_factor", 0),
        ("suffix_decoding_max_spec_factor", float("nan")),
        ("suffix_decoding_max_spec_factor", "2"),
        ("suffix_decoding_min_token_prob", 1.5),
    ],
)
def test_refuses_bad_options(key, value) -> None:
    with pytest.raises(ValueError, match=f"{key} is {value!r}"):
        Options(**{key: value})
