import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from eyas.sampling.params import SamplingParams, bad_word_ids
from eyas.sampling.rules import SamplingRules

NAN, INF = float("nan"), float("inf")

# https://docs.vllm.ai/en/latest/api/vllm/sampling_params: names and defaults
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "allowed_token_ids": None,
}


def test_defaults_are_vllms():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.logit_bias == {}
    assert params.num_speculative_tokens is None
    assert set(vars(params)) == {
        *VLLM_DEFAULTS, "stop", "stop_token_ids", "bad_words", "logit_bias",
        "num_speculative_tokens",
    }  # fmt: skip


def test_values_are_normalised():
    params = SamplingParams(
        top_k=-1,
        temperature=1,
        seed=-1,
        stop="end",
        stop_token_ids=[5, 3, 5],
        bad_words=["a", "a"],
        allowed_token_ids=[2, 2, 1],
        logit_bias={3: 1},
        max_tokens=np.int64(7),
        top_p=np.float32(0.5),
    )
    assert (params.top_k, params.seed, params.stop) == (0, None, ("end",))
    assert (params.stop_token_ids, params.bad_words) == ((5, 3), ("a",))
    assert (params.allowed_token_ids, params.logit_bias) == ((2, 1), {3: 1.0})
    for value, kind in (
        (params.temperature, float),
        (params.top_p, float),
        (params.max_tokens, int),
    ):
        assert type(value) is kind


def test_limits_are_accepted():
    SamplingParams(
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-9, temperature=1e-5,
        top_p=1, min_p=1, seed=-(2**63), max_tokens=None, min_tokens=10**6,
        logprobs=-1, prompt_logprobs=0, logit_bias={0: -100, 1: 100},
        num_speculative_tokens=0, n=16384,
    )  # fmt: skip
    SamplingParams(seed=2**63 - 1, max_tokens=3, min_tokens=3, temperature=0, n=1, top_k=10**9)


INTEGERS = {
    "n": (0, -1, 16385), "top_k": (-2,), "seed": (2**63, -(2**63) - 1), "max_tokens": (0, -1),
    "min_tokens": (-1,), "logprobs": (-2,), "prompt_logprobs": (-2,),
    "num_speculative_tokens": (-1,),
}  # fmt: skip
NUMBERS = {
    "presence_penalty": (-2.01, 2.01), "frequency_penalty": (-2.01, 2.01),
    "repetition_penalty": (0, -1.0), "temperature": (-0.1,), "top_p": (0, -0.5, 1.01),
    "min_p": (-0.1, 1.1),
}  # fmt: skip
MAY_BE_NONE = {"seed", "max_tokens", "logprobs", "prompt_logprobs", "num_speculative_tokens"}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
IMPOSSIBLE = [
    *((name, v) for name, values in INTEGERS.items()
      for v in (*values, True, 1.0, NAN, INF, "1", [1])),
    *((name, v) for name, values in NUMBERS.items()
      for v in (*values, True, NAN, INF, -INF, "1", 1j, 10**400, None, [1.0])),
    *((name, None) for name in INTEGERS if name not in MAY_BE_NONE),
    *((name, v) for name in FLAGS for v in (1, 0, None, "yes")),
    *(("stop", v) for v in ("", [""], ["a", ""], [1], 1, {"a"})),
    *(("bad_words", v) for v in ("word", [""], [1], 1)),
    *((name, v) for name in ("stop_token_ids", "allowed_token_ids")
      for v in (1, "1", [-1], [1.0], [True], ["1"], [None])),
    ("allowed_token_ids", []),
    *(("logit_bias", v) for v in ([1], "a", {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1: NAN},
                                  {1: INF}, {1: "1"}, {1: 100.5}, {1: None})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_impossible_values_are_named(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    culprit = value
    if isinstance(value, dict | list) and len(value) == 1:
        (culprit,) = value.values() if isinstance(value, dict) else value
    shown = {repr(value), repr(culprit), *(map(repr, value) if isinstance(value, dict) else ())}
    assert any(text in message for text in shown) or value == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got n=2"),
        ({"min_tokens": 5, "max_tokens": 4}, "got min_tokens=5 with max_tokens=4"),
        ({"min_tokens": 17}, "got min_tokens=17 with max_tokens=16"),
        ({"stop": "x", "detokenize": False}, r"stop=\['x'\] needs detokenize=True"),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_unknown_keywords_are_refused():
    for name in ("guided_decoding", "best_of", "logits_processors", "structured_outputs"):
        with pytest.raises(ValueError, match=f"SamplingParams: '{name}' exists in vLLM but not in"):
            SamplingParams(**{name: None})
    with pytest.raises(ValueError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.5)
    with pytest.raises(ValueError, match=r"unknown parameter 'zzz'$"):
        SamplingParams(zzz=0.5)


def test_is_a_value():
    params = SamplingParams(seed=3, stop=["a"], logit_bias={1: 2.0})
    with pytest.raises(FrozenInstanceError):
        params.seed = 4
    assert replace(params, seed=4).seed == 4
    assert replace(params, seed=3) == params == copy.deepcopy(params)
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(ValueError, match="top_p"):
        replace(params, top_p=2.0)


def test_rules_hold_every_value():
    params = SamplingParams(
        temperature=0.5, top_p=0.6, top_k=7, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3,
        repetition_penalty=1.4, logit_bias={3: 1.5}, allowed_token_ids=[1, 2, 3], bad_words=["x"],
        min_tokens=4, stop_token_ids=[9, 8], logprobs=5, prompt_logprobs=-1,
    )  # fmt: skip
    assert params.rules((0, 9), [[4, 5]], 10) == SamplingRules(
        temperature=0.5, top_p=0.6, top_k=7, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3,
        repetition_penalty=1.4, logit_bias=((3, 1.5),), allowed_token_ids=(1, 2, 3),
        bad_words=((4, 5),), min_tokens=4, stop_ids=(0, 9, 8), logprobs=5, prompt_logprobs=-1,
    )  # fmt: skip
    assert SamplingParams().rules((), (), 10) == SamplingRules()
    ignoring = SamplingParams(ignore_eos=True, stop_token_ids=[1])
    assert ignoring.rules((0,), (), 10).stop_ids == (1,)


@pytest.mark.parametrize(
    ("values", "eos", "bad_words", "message"),
    [
        (
            {"logit_bias": {10: 1.0}},
            (),
            (),
            "logit_bias: token id 10 is outside the vocabulary of 10",
        ),
        ({"allowed_token_ids": [1, 11]}, (), (), "allowed_token_ids: token id 11 is outside"),
        ({"stop_token_ids": [10]}, (), (), "stop_token_ids: token id 10 is outside"),
        ({}, (12,), (), "end-of-sequence ids: token id 12 is outside"),
        ({"bad_words": ["x"]}, (), [[1, 13]], "bad_words: token id 13 is outside"),
        ({"logprobs": 11}, (), (), "logprobs=11 exceeds the vocabulary of 10 tokens"),
        ({"prompt_logprobs": 11}, (), (), "prompt_logprobs=11 exceeds"),
        ({"allowed_token_ids": [1], "min_tokens": 1}, (1,), (), "no token is left"),
        (
            {"allowed_token_ids": [1, 2], "min_tokens": 1, "bad_words": ["x"]},
            (1,),
            [[2]],
            "no token is left",
        ),
        ({"bad_words": ["x"]}, (), [[i] for i in range(10)], "no token is left"),
    ],
)
def test_rules_that_the_model_cannot_follow(values, eos, bad_words, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values).rules(eos, bad_words, 10)


def test_bad_words_are_looked_up_with_and_without_a_space():
    # As in vLLM: the spaced form counts if only its first token differs.
    vocabulary = {
        "cat": [1], " cat": [2], "dogma": [3, 4], " dogma": [5, 4],
        "bird": [6, 7], " bird": [8], "x": [9], " x": [9], "nil": [], " nil": [],
    }  # fmt: skip
    encode = vocabulary.__getitem__
    words = ["cat", " dogma", "bird", "x"]
    assert bad_word_ids(words, encode) == ((1,), (2,), (3, 4), (5, 4), (6, 7), (9,))
    assert bad_word_ids([], encode) == ()
    with pytest.raises(ValueError, match="'nil' has no tokens"):
        bad_word_ids(["nil"], encode)
