import math
from dataclasses import replace

import numpy as np
import pytest
import sampling_oracle
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.sampling.processors import LogitRules, LogitsError, candidates, top_k_indices
from eyas.sampling.rules import SamplingRules
from eyas.sampling.sampler import SampleState, distribution, sample

EPS = np.finfo(np.float64).eps
seeds = st.integers(0, 2**32 - 1)


def random_rules(rng, vocab_size):
    """Each rule is on with probability one half."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    def tokens(size):
        return tuple(rng.choice(vocab_size, size, replace=False).tolist())

    return SamplingRules(
        temperature=maybe(float(rng.uniform(0.2, 2)), 1.0),
        top_p=maybe(float(rng.uniform(0.05, 1)), 1.0),
        top_k=maybe(int(rng.integers(1, vocab_size + 3)), 0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe(tuple((t, float(rng.uniform(-5, 5))) for t in tokens(2)), ()),
        allowed_token_ids=maybe(tokens(vocab_size - 2), None),
        bad_words=maybe(
            tuple(tuple(rng.integers(0, 3, int(rng.integers(1, 4))).tolist()) for _ in range(3)), ()
        ),
        min_tokens=maybe(int(rng.integers(1, 8)), 0),
        stop_ids=tokens(1),
    )


def random_case(seed):
    """Rules, logits, prompt and output over a vocabulary so small that tokens repeat."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(8, 20))
    logits = rng.normal(0, 3, vocab_size).astype(np.float32)
    prompt = rng.integers(0, vocab_size, int(rng.integers(1, 6))).tolist()
    output = rng.integers(0, 5, int(rng.integers(0, 8))).tolist()
    return random_rules(rng, vocab_size), logits, prompt, output


@given(seeds, st.integers(0, 8))
def test_distribution_equals_the_oracle_for_all_rules_together(seed, num_drafts):
    rules, logits, prompt, output = random_case(seed)
    split = max(len(output) - num_drafts, 0)
    state = SampleState(rules, 0, 0, len(prompt), prompt + output[:split])
    got = distribution(torch.from_numpy(logits), state, output[split:])
    processed = sampling_oracle.scores(logits.tolist(), rules, prompt, output)
    want = torch.tensor(sampling_oracle.probabilities(processed, rules), dtype=torch.float64)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=256 * EPS, atol=0)
    assert got.dtype == torch.float64
    assert abs(float(got.sum()) - 1) <= len(logits) * EPS


@given(seeds, st.integers(0, 8))
def test_greedy_is_the_first_best_of_the_oracle(seed, num_drafts):
    rules, logits, prompt, output = random_case(seed)
    rules = replace(rules, temperature=0.0)
    split = max(len(output) - num_drafts, 0)
    state = SampleState(rules, 0, 0, len(prompt), prompt + output[:split])
    processed = sampling_oracle.scores(logits.tolist(), rules, prompt, output)
    token = sample(torch.from_numpy(logits), state, output[split:])
    assert token == processed.index(max(processed))
    assert distribution(torch.from_numpy(logits), state, output[split:])[token] == 1


def processed_logits(rules, logits, prompt, output):
    state = SampleState(rules, 0, 0, len(prompt), prompt + output)
    return state.logit_rules.apply(np.asarray(logits, np.float32), state.prefix(()))


def test_mask_then_bias_then_penalties():
    rules = SamplingRules(
        logit_bias=((0, 4.0), (1, 4.0)),
        allowed_token_ids=(0, 2, 3),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    got = processed_logits(rules, [-1.0, 0.0, -1.0, 6.0], [3], [0, 0])
    # Token 0: (-1 + 4) / 2 - 2 * 0.25 - 0.5; a bias does not lift a mask; the prompt's token 3
    # has a repetition penalty only.
    assert got.tolist() == [0.5, -math.inf, -1.0, 3.0]


def test_bad_words_look_at_the_output_only():
    rules = SamplingRules(bad_words=((1, 2, 3),))
    zeros = [0.0] * 5
    assert processed_logits(rules, zeros, [1], [2])[3] == 0
    assert processed_logits(rules, zeros, [1, 2], [])[3] == 0
    assert processed_logits(rules, zeros, [0], [1, 2])[3] == -math.inf
    assert processed_logits(rules, zeros, [0], [1, 2, 0])[3] == 0


def test_stop_ids_are_masked_until_min_tokens():
    rules = SamplingRules(temperature=0.0, min_tokens=2, stop_ids=(1,))
    logits = torch.tensor([0.0, 5.0, 1.0])
    state = SampleState(rules, 0, 0, 1, [0])
    assert [sample(logits, state, extra) for extra in ((), (0,), (0, 0))] == [2, 2, 1]


def test_candidates_follow_the_order_min_p_top_k_top_p():
    # Probabilities 0.4, 0.3, 0.2, 0.1: min-p 0.3 drops the last; of the rest top-k keeps two, which
    # are 4/7 and 3/7 then, so that top-p 0.5 keeps one; on the raw ones it would keep two.
    scores = np.log([0.2, 0.4, 0.1, 0.3])
    rules = SamplingRules()
    assert candidates(scores, replace(rules, min_p=0.3)).ids.tolist() == [0, 1, 3]
    assert candidates(scores, replace(rules, min_p=0.3, top_k=2)).ids.tolist() == [1, 3]
    assert candidates(scores, replace(rules, top_p=0.5)).ids.tolist() == [1, 3]
    assert candidates(scores, replace(rules, top_k=2, top_p=0.5)).ids.tolist() == [1]
    # At temperature 0.5 the best two are 16/30 and 9/30 before top-p looks.
    assert candidates(scores, replace(rules, temperature=0.5, top_p=0.5)).ids.tolist() == [1]


def test_lower_ids_win_ties():
    scores = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    assert candidates(scores, SamplingRules(top_k=2)).ids.tolist() == [1, 3]
    assert candidates(scores, SamplingRules(top_k=4)).ids.tolist() == [0, 1, 3, 4]
    assert candidates(np.zeros(8), SamplingRules(top_p=0.5)).ids.tolist() == [0, 1, 2, 3]
    assert candidates(scores, SamplingRules(min_p=1.0)).ids.tolist() == [1, 3, 4]
    assert candidates(scores, SamplingRules(top_p=1e-9)).ids.tolist() == [1]


@given(st.lists(st.integers(-3, 3), max_size=30), st.integers(0, 35))
def test_top_k_indices(values, k):
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert top_k_indices(np.array(values, np.float64), k).tolist() == sorted(order[:k])


@given(
    st.integers(0, 2**32),
    st.integers(1000, 5000),
    st.integers(1, 3000),
    st.sampled_from([1, 30, 10**9]),
    st.sampled_from([np.float32, np.float64]),
)
def test_top_k_indices_of_many(seed, size, k, num_values, dtype):
    # Few distinct values: many ties, on both sides of the k-th. Some are masked.
    values = np.random.default_rng(seed).integers(0, num_values, size).astype(dtype)
    values[values % 7 == 6] = -np.inf
    order = np.argsort(-values, kind="stable")
    assert top_k_indices(values, k).tolist() == sorted(order[:k].tolist())


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([1e-9, 0.1, 0.4, 1.0]))
def test_top_k_after_min_p(seed, top_k, min_p):
    scores = np.random.default_rng(seed).integers(-4, 4, 50).astype(np.float64)
    scores[:5] = -np.inf  # masked
    probable = np.flatnonzero(np.exp(scores - scores.max()) >= min_p)
    order = sorted(probable, key=lambda i: (-scores[i], i))
    got = candidates(scores, SamplingRules(min_p=min_p, top_k=top_k)).ids
    assert got.tolist() == sorted(order[:top_k])


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.9999, 1 - 2**-53])
@pytest.mark.parametrize("spread", [0.0, 0.5, 6.0])
def test_top_p_over_a_large_vocabulary_equals_a_full_sort(top_p, spread):
    # The partial sorts must not show: 20000 tokens need several of them, or all.
    scores = np.random.default_rng(3).normal(0, spread, 20000)
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores - scores.max())
    enough = np.flatnonzero(np.cumsum(weights[order]) >= top_p * weights.sum())
    size = enough[0] + 1 if len(enough) else len(scores)
    got = candidates(scores, SamplingRules(top_p=top_p)).ids
    assert got.tolist() == sorted(order[:size].tolist())


@given(
    st.integers(0, 2**32),
    st.integers(2, 9000),
    st.sampled_from([0.0, 1.0, 4.0, 8.0, 30.0]),
    st.floats(0, 1),
    st.sampled_from([0, 1e-16, -1e-16, 1e-12, -1e-12, 1e-7, -1e-7, 1e-4, -1e-4]),
)
def test_top_p_at_the_edge_of_a_set_equals_a_full_sort(seed, size, spread, place, step):
    # top_p is the share of the most probable tokens, or that and a little: the choice is as close
    # as rounding and the tail of improbable tokens make it.
    scores = np.random.default_rng(seed).normal(0, spread, size)
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores - scores.max())
    sums = np.cumsum(weights[order])
    top_p = sums[int(place**8 * (size - 1))] / weights.sum() * (1 + step)
    top_p = min(max(float(top_p), 1e-9), 1 - 2**-53)
    enough = np.flatnonzero(sums >= top_p * weights.sum())
    count = enough[0] + 1 if len(enough) else size
    got = candidates(scores, SamplingRules(top_p=top_p)).ids
    assert got.tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5, 1e308])
def test_no_temperature_breaks(temperature):
    scores = np.array([3.0, 7.0, -200.0, 7.0])
    left = candidates(scores, SamplingRules(temperature=temperature))
    assert left.ids.tolist() == ([0, 1, 2, 3] if temperature > 5e-324 else [1, 3])
    assert left.log_weights.max() == 0
    assert np.isfinite(left.log_weights).all()


def test_masks_that_leave_nothing_are_an_error():
    state = SampleState(
        SamplingRules(allowed_token_ids=(1, 2), bad_words=((1,), (0, 2))), 0, 0, 1, [5, 0]
    )
    with pytest.raises(LogitsError, match="no token is left"):
        sample(torch.zeros(6), state)
    assert sample(torch.zeros(6), state, (3,)) == 2


def test_a_penalty_that_overflows_is_an_error():
    state = SampleState(SamplingRules(repetition_penalty=1e-308), 0, 0, 1, [0])
    with pytest.raises(LogitsError, match="repetition_penalty=1e-308"):
        sample(torch.tensor([10.0, 0.0]), state)


def test_rules_that_change_nothing_are_known():
    assert LogitRules(SamplingRules(temperature=0.5, top_k=3, stop_ids=(2,))).changes_nothing(0)
    waits = LogitRules(SamplingRules(min_tokens=2, stop_ids=(2,)))
    assert [waits.changes_nothing(n) for n in (0, 1, 2)] == [False, False, True]
    for rules in (
        SamplingRules(presence_penalty=0.1),
        SamplingRules(frequency_penalty=0.1),
        SamplingRules(repetition_penalty=1.1),
        SamplingRules(logit_bias=((0, 1.0),)),
        SamplingRules(allowed_token_ids=(0,)),
        SamplingRules(bad_words=((0,),)),
    ):
        assert not LogitRules(rules).changes_nothing(0)
