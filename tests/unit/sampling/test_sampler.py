import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import chi_square

from eyas.sampling.noise import gumbel
from eyas.sampling.processors import LogitsError
from eyas.sampling.rules import SamplingRules
from eyas.sampling.sampler import SampleState, distribution, draw_draft, draw_from, sample

GREEDY = SamplingRules(temperature=0.0)


def new_state(rules=GREEDY, seed=0, sample_index=0, prompt=(0,), output=()):
    return SampleState(rules, seed, sample_index, len(prompt), [*prompt, *output])


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32))


def test_greedy_takes_the_lowest_of_the_best():
    assert sample(torch.tensor([1.0, 3.0, 3.0, 0.0]), new_state()) == 1
    biased = new_state(replace(GREEDY, logit_bias=((2, 1.0), (3, 4.0))))
    assert sample(torch.tensor([1.0, 3.0, 3.0, 0.0]), biased) == 2


@given(st.integers(0, 2**32), st.integers(-(2**63), 2**63 - 1), st.integers(0, 3))
def test_sample_is_the_documented_argmax(row_seed, seed, num_drafts):
    rules = SamplingRules(temperature=0.7, top_k=5)
    state = new_state(rules, seed, sample_index=2, prompt=(1, 2), output=(3,))
    logits = normal(row_seed, 12)
    logprobs = logits.double().log_softmax(-1).numpy() / 0.7
    survivors = np.argsort(-logprobs)[:5]
    totals = logprobs + gumbel(seed, 2, 1 + num_drafts, np.arange(12))
    want = max(survivors, key=lambda token: totals[token])
    assert sample(logits, state, [0] * num_drafts) == want


def test_neither_sample_nor_distribution_changes_anything():
    rules = SamplingRules(repetition_penalty=1.2, presence_penalty=1, bad_words=((1, 2),))
    state, logits = new_state(rules, output=(1, 1)), normal(0, 9)
    before, row = copy.deepcopy(state), logits.clone()
    first = sample(logits, state, (4, 5, 1)), distribution(logits, state, (4, 5, 1))
    sample(logits, state, (7, 8))
    again = sample(logits, state, (4, 5, 1)), distribution(logits, state, (4, 5, 1))
    assert first[0] == again[0]
    assert torch.equal(first[1], again[1])
    assert torch.equal(row, logits)
    assert state == before


def test_a_row_has_its_bits_wherever_it_lies():
    # Alone, in a matrix, or as a column of one: neighbours and strides do not matter.
    rows = normal(1, 5, 1001)
    columns = rows.T.contiguous()
    state = new_state(SamplingRules(top_p=0.9))
    for i in range(5):
        alone = distribution(rows[i].clone(), state)
        assert torch.equal(alone, distribution(rows[i], state))
        assert torch.equal(alone, distribution(columns[:, i], state))
        assert sample(rows[i], state) == sample(columns[:, i], state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rules", [GREEDY, SamplingRules(), SamplingRules(presence_penalty=1)])
def test_logits_that_are_not_finite_are_an_error(bad, rules):
    logits = torch.tensor([0.0, 9.0, bad, bad])
    for function in (sample, distribution):
        with pytest.raises(LogitsError, match=r"not finite: -?(nan|inf) at token 2, 2 of 4"):
            function(logits, new_state(rules))


@pytest.mark.parametrize(
    "rules",
    [
        SamplingRules(),
        SamplingRules(temperature=0.6, top_k=6, top_p=0.95, min_p=0.02, logit_bias=((3, 1.0),)),
    ],
)
def test_frequencies_are_those_of_the_distribution(rules):
    logits, draws = normal(5, 8), 4000
    probs = distribution(logits, new_state(rules))
    counts = np.zeros(8)
    for seed in range(draws // 4):  # seeds, samples and positions all count as fresh draws
        for sample_index in range(2):
            state = new_state(rules, seed, sample_index)
            counts[sample(logits, state)] += 1
            counts[sample(logits, state, (1,))] += 1
    possible = probs.numpy() > 0
    assert counts[~possible].sum() == 0
    expected = draws * probs.numpy()[possible]
    assert expected.min() > 5
    assert chi_square(counts[possible], expected) < 29.9  # at most 7 degrees: p = 1e-4


def test_a_close_draft_proposes_the_same_token():
    # Daliri et al., theorem 1: with shared noise P[equal] >= (1 - TV) / (1 + TV).
    target, draws = normal(7, 50), 1000
    draft = target + 0.3 * normal(8, 50)
    rules = SamplingRules()
    distance = 0.5 * float(
        (distribution(target, new_state(rules)) - distribution(draft, new_state(rules))).abs().sum()
    )
    equal = sum(
        sample(target, new_state(rules, seed)) == sample(draft, new_state(rules, seed))
        for seed in range(draws)
    )
    bound = (1 - distance) / (1 + distance)
    assert 0.05 < distance < 0.5
    assert equal / draws > bound - 4 * (bound * (1 - bound) / draws) ** 0.5


def test_draw_from_never_takes_a_token_without_weight():
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert draw_from(weights, 2.0**-53) == 1
    assert draw_from(weights, 0.2499) == 1
    assert draw_from(weights, 0.25) == 3
    assert draw_from(weights, 1 - 2.0**-53) == 3
    assert draw_from(weights / 3, 1 - 2.0**-53) == 3
    assert draw_from(np.array([0.0, 5e-324, 0.0]), 1 - 2.0**-53) == 1


def test_draw_draft_follows_its_distribution():
    probs = torch.tensor([0.1, 0.0, 0.2, 0.7], dtype=torch.float64)
    draws = 2000
    tokens = [draw_draft(probs, new_state(seed=s), p) for s in range(draws // 2) for p in (0, 1)]
    counts = np.bincount(tokens, minlength=4)
    assert counts[1] == 0
    assert chi_square(counts[[0, 2, 3]], [0.1 * draws, 0.2 * draws, 0.7 * draws]) < 18.4  # 2 df
    assert len({(draw_draft(probs, new_state(seed=3), 1)) for _ in range(3)}) == 1
