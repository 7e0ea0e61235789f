"""What is taken for a prompt, and what is refused with which words."""

import numpy as np
import pytest
import torch
from checkpoints import tiny_tokenizer

from eyas.engine.inputs import CheckedPrompt, InputReader
from eyas.sampling.params import SamplingParams
from eyas.tokenizer import Tokenizer

TOKENIZER = Tokenizer(
    tiny_tokenizer(), eos_token_ids=(1,), bos_token_id=0, chat_template=None, template_tokens={}
)
READER = InputReader(TOKENIZER, vocab_size=260, max_model_len=10, eos_token_ids=(1,))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("ab", "ab"),
        ({"prompt": "ab"}, "ab"),
        ({"prompt": "seen", "prompt_token_ids": "ab"}, "seen"),
        ({"prompt_token_ids": "ab"}, None),
    ],
)
def test_forms_of_a_prompt(prompt, text):
    ids = TOKENIZER.encode("ab")
    if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
        prompt = prompt | {"prompt_token_ids": ids}
    assert READER.prompt(prompt) == CheckedPrompt(text, tuple(ids))


@pytest.mark.parametrize("ids", [[4, 5], (4, 5), range(4, 6), list(np.array([4, 5]))])
def test_token_ids(ids):
    checked = READER.prompt(ids)
    assert checked == CheckedPrompt(None, (4, 5))
    assert {type(token) for token in checked.token_ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty: give at least one token"),
        ("", "the prompt is empty: give at least one token"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([4, 5, 260], "token id 260 at prompt position 2 is outside the vocabulary of 260 tokens"),
        ([4, -1], "token id -1 at prompt position 1 is outside the vocabulary of 260 tokens"),
        ([4, 2.0], "token id 2.0 at prompt position 1 is not an integer"),
        ([True], "token id True at prompt position 0 is not an integer"),
        (["a"], "token id 'a' at prompt position 0 is not an integer"),
        ([[4, 5]], r"token id \[4, 5\] at prompt position 0 is not an integer"),
        ([4] * 10, "the prompt has 10 tokens, but max_model_len=10 leaves room for 9: shorten it"),
        ("a" * 10, "the prompt has 10 tokens"),
        (None, "the prompt is a NoneType: it must be a string, a list of token ids"),
        (b"ab", "the prompt is a bytes"),
        (torch.tensor([4]), "the prompt is a Tensor"),
        ({}, "the prompt has neither 'prompt' nor 'prompt_token_ids'"),
        ({"prompt": [4]}, "'prompt' is a list: it must be a string"),
        ({"prompt_token_ids": "ab"}, "'prompt_token_ids' is a str: it must be a list of integers"),
        ({"text": "ab"}, "unknown prompt key 'text': use prompt or prompt_token_ids"),
        ("a\ud800", "lone surrogate at character 1"),
    ],
)
def test_refused(prompt, message):
    with pytest.raises(ValueError, match=message) as error:
        READER.prompt(prompt)
    assert "\n" not in str(error.value)


def test_truncation_keeps_the_last_tokens():
    ids = [*range(20, 40)]
    assert READER.prompt(ids, -1).token_ids == tuple(range(31, 40))
    assert READER.prompt(ids, 3).token_ids == (37, 38, 39)
    assert READER.prompt(ids[:2], 3).token_ids == (20, 21)
    with pytest.raises(ValueError, match="the prompt has 10 tokens"):
        READER.prompt(ids, 10)
    for bad in (0, -2, 1.5, True):
        with pytest.raises(ValueError, match=f"truncate_prompt_tokens is {bad!r}: it must be"):
            READER.prompt(ids, bad)


def test_rules_know_the_model():
    rules = READER.rules(SamplingParams(stop_token_ids=[7], bad_words=["so"]))
    assert rules.stop_ids == (1, 7)
    # At the start of a text, " so" is no longer by one token only: no form of its own.
    plain = tuple(TOKENIZER.encode("so", add_special_tokens=False))
    assert plain in rules.bad_words
    with pytest.raises(ValueError, match="logit_bias: token id 260 is outside the vocabulary"):
        READER.rules(SamplingParams(logit_bias={260: 1.0}))
