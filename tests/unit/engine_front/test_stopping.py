"""Stop rules against a brute-force reading of their definition."""

import itertools

import pytest
from checkpoints import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.stopping import Finish, OutputText, StopRules, stop_rules
from eyas.sampling.params import SamplingParams
from eyas.tokenizer import IncrementalDecoder, Tokenizer

TOKENIZER = Tokenizer(
    tiny_tokenizer(),
    eos_token_ids=(1,),
    bos_token_id=0,
    chat_template=None,
    template_tokens={},
)


class Pieces:
    """A decoder whose tokens are strings, known by index; None holds the text back, like the first
    bytes of a character."""

    def __init__(self, pieces):
        self.pieces, self.held = pieces, ""

    def push(self, token_id):
        self.held += self.pieces[token_id].rstrip("~")
        if self.pieces[token_id].endswith("~"):
            return ""
        text, self.held = self.held, ""
        return text

    def finish(self):
        text, self.held = self.held, ""
        return text


def rules(**changes):
    values = {
        "eos_token_ids": frozenset(),
        "stop_token_ids": frozenset(),
        "stop": (),
        "include_stop_str_in_output": False,
        "min_tokens": 0,
        "max_tokens": 1000,
    }
    return StopRules(**(values | changes))


def run(stop_rules, decoder, tokens):
    """The number of tokens taken, how it finished, the text, and the text shown on the way."""
    output, shown = OutputText(stop_rules, decoder), []
    for count, token in enumerate(tokens, start=1):
        finish = output.push(token)
        if finish:
            return count, finish, output.text, shown
        shown.append(output.text)
    return len(tokens), None, output.text, shown


def oracle(stop_rules, pieces, tokens):
    """The same by the definition: after each token, look at the whole text anew."""
    decoder, text, r = Pieces(pieces), "", stop_rules
    for count, token in enumerate(tokens, start=1):
        before = len(text)
        is_eos = token in r.eos_token_ids
        is_stop = count > r.min_tokens and (is_eos or token in r.stop_token_ids)
        last = is_stop or count == r.max_tokens
        if not is_stop or r.include_stop_str_in_output:
            text += decoder.push(token)
        if last:
            text += decoder.finish()
        matches = [
            (start, order, stop)
            for order, stop in enumerate(r.stop)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if matches and count > r.min_tokens:
            start, _, stop = min(matches)
            end = start + len(stop) * r.include_stop_str_in_output
            return count, Finish("stop", stop), text[:end]
        if is_stop:
            return count, Finish("stop", None if is_eos else token), text
        if last:
            return count, Finish("length"), text
    return len(tokens), None, text


PIECES = ("a", "b", "ab", "ba", "c~", "a~", "", "abc", "é", "bé")
WORDS = st.text("abcé", min_size=1, max_size=4)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    stop=st.lists(WORDS, max_size=3, unique=True),
    eos=st.sets(st.integers(0, 9), max_size=1),
    stop_ids=st.sets(st.integers(0, 9), max_size=1),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
    max_tokens=st.integers(1, 12),
)
def test_agrees_with_the_definition(tokens, stop, eos, stop_ids, include, min_tokens, max_tokens):
    r = rules(
        stop=tuple(stop),
        eos_token_ids=frozenset(eos),
        stop_token_ids=frozenset(stop_ids),
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
    )
    count, finish, text, shown = run(r, Pieces(PIECES), tokens)
    expected_count, expected_finish, expected_text = oracle(r, PIECES, tokens)
    assert (count, finish) == (expected_count, expected_finish)
    if finish:
        assert text == expected_text
    # What was shown is never taken back, and only what may still become a stop string is withheld.
    for earlier, later in itertools.pairwise([*shown, text]):
        assert later.startswith(earlier)
    if not finish:
        held = expected_text[len(text) :]
        assert expected_text.startswith(text)
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_a_stop_string_across_tokens_and_multi_byte_characters():
    text = "Grüße 🐦 and more"
    tokens = TOKENIZER.encode(text)
    assert len(tokens) > len(text)  # single bytes
    finishes = run(rules(stop=("e 🐦 a",)), IncrementalDecoder(TOKENIZER, ()), tokens)
    count, finish, output, shown = finishes
    assert finish == Finish("stop", "e 🐦 a")
    assert output == "Grüß"
    assert TOKENIZER.decode(tokens[:count]) == "Grüße 🐦 a"
    assert max(shown, key=len) == "Grüß"


def test_text_is_shown_again_when_it_turns_out_not_to_be_a_stop_string():
    r = rules(stop=("aab",))
    _, finish, text, shown = run(r, Pieces(["a", "c"]), [0, 0, 0, 1])
    assert finish is None
    assert shown == ["", "", "a", "aaac"]
    assert text == "aaac"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("cd", "bc"), ("bc", "a")),  # the earliest in the text, whatever the order given
        (("bc", "bcd"), ("bc", "a")),  # on a tie, the first given
        (("bcd", "bc"), ("bcd", "a")),
    ],
)
def test_which_stop_string_wins(stop, expected):
    _, finish, text, _ = run(rules(stop=stop), Pieces(["abcde"]), [0])
    assert (finish.stop_reason, text) == expected


@pytest.mark.parametrize(
    ("min_tokens", "stop", "text"),
    [
        (0, "e", " is L"),
        (5, "e", " is Lee, and I'm a stud"),  # vLLM's own example, by words
        (9, "e", " is Lee, and I'm a student in the coll"),
    ],
)
def test_min_tokens_and_stop_strings(min_tokens, stop, text):
    pieces = [" is", " Lee", ",", " and", " I'm", " a", " student", " in", " the", " college"]
    _, _, output, _ = run(
        rules(stop=(stop,), min_tokens=min_tokens), Pieces(pieces), range(len(pieces))
    )
    assert output == text


def test_a_stop_string_may_begin_within_min_tokens_but_not_end_there():
    r = rules(stop=("xaby", "ab"), min_tokens=1)
    assert run(r, Pieces(["xab", "z"]), [0, 1])[1] is None
    assert run(r, Pieces(["xab", "y"]), [0, 1])[1] == Finish("stop", "xaby")


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, True, "ab"), (True, True, "ab"), (False, False, "ab"), (True, False, "ab</s>")],
)
def test_the_text_of_an_eos_token(include, skip, text):
    tokens = [*TOKENIZER.encode("ab"), 1, *TOKENIZER.encode("c")]
    r = rules(eos_token_ids=frozenset({1}), include_stop_str_in_output=include)
    count, finish, output, _ = run(r, IncrementalDecoder(TOKENIZER, (), skip), tokens)
    assert TOKENIZER.decode(tokens[:count], skip_special_tokens=False) == "ab</s>"
    assert finish == Finish("stop", None)
    assert output == text


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_text_of_a_stop_token(include, text):
    tokens = TOKENIZER.encode("abcd")
    token = TOKENIZER.encode("c")[0]
    assert token in tokens
    r = rules(stop_token_ids=frozenset({token}), include_stop_str_in_output=include)
    _, finish, output, _ = run(r, IncrementalDecoder(TOKENIZER, ()), tokens)
    assert finish == Finish("stop", token)
    assert output == text


def test_an_unfinished_character_is_shown_at_the_end():
    tokens = TOKENIZER.encode("aß")[:-1]
    _, finish, text, _ = run(
        rules(max_tokens=len(tokens)), IncrementalDecoder(TOKENIZER, ()), tokens
    )
    assert finish == Finish("length")
    assert text == "a\ufffd"


def test_a_stop_token_as_the_last_one_allowed_is_a_stop():
    r = rules(eos_token_ids=frozenset({7}), max_tokens=1)
    assert run(r, None, [7])[1] == Finish("stop", None)
    assert run(r, None, [8])[1] == Finish("length")


def test_rules_of_sampling_params():
    made = stop_rules(SamplingParams(max_tokens=None, stop="x"), (1, 2), room=9)
    assert made == rules(stop=("x",), eos_token_ids=frozenset({1, 2}), max_tokens=9)
    made = stop_rules(
        SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[3], min_tokens=4), (1,), 9
    )
    assert made == rules(stop_token_ids=frozenset({3}), min_tokens=4, max_tokens=9)
    assert stop_rules(SamplingParams(max_tokens=5), (), 9).max_tokens == 5
