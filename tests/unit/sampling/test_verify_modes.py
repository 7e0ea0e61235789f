"""Both acceptance rules through the functions that the runner calls."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_oracle import chi_square
from test_processors import random_case

from eyas.sampling.processors import LogitsError
from eyas.sampling.rules import SamplingRules
from eyas.sampling.sampler import SampleState, distribution, draw_draft, sample
from eyas.sampling.verify import (
    Verified,
    accept_probability,
    residual,
    verify_exact,
    verify_rejection,
)

EPS = np.finfo(np.float64).eps
PLAIN = SamplingRules()
V = 4


def table(seed):
    """A toy model: logits [V] as a function of the last token, and of how many came before."""
    return np.random.default_rng(seed).normal(0, 1.2, (8, V, V)).astype(np.float32)


def rows_after(model, tokens, drafts):
    prefix = [*tokens, *drafts]
    lengths = range(len(tokens), len(prefix) + 1)
    return torch.from_numpy(np.stack([model[n % 8, prefix[n - 1]] for n in lengths]))


@given(st.integers(0, 2**32), st.integers(0, 6), st.booleans(), st.data())
def test_exact_equals_sequential_sampling_for_any_drafts(seed, num_drafts, greedy, data):
    rules, logits, prompt, output = random_case(seed)
    if greedy:
        rules = replace(rules, temperature=0.0)
    rows = torch.from_numpy(
        np.random.default_rng(seed + 1).normal(0, 3, (num_drafts + 1, len(logits)))
    ).float()

    def new_state():
        return SampleState(rules, seed, 1, len(prompt), prompt + output)

    # What plain decoding gives if the model's answer to the prefix of length j is row j.
    sequential, state = [], new_state()
    for row in rows:
        sequential.append(sample(row, state))
        state.append(sequential[-1:])
    right = data.draw(st.integers(0, num_drafts))
    token = st.integers(0, len(logits) - 1)
    drafts = sequential[:right] + [data.draw(token) for _ in range(num_drafts - right)]
    agree = 0
    while agree < num_drafts and drafts[agree] == sequential[agree]:
        agree += 1

    state = new_state()
    assert verify_exact(rows, state, drafts) == Verified(tuple(sequential[: agree + 1]), agree)
    assert state == new_state()
    wrong_later = rows.clone()
    wrong_later[agree + 1 :] = torch.nan
    assert verify_exact(wrong_later, state, tuple(drafts)).tokens == tuple(sequential[: agree + 1])


@pytest.mark.parametrize("verify", [verify_exact, lambda *a: verify_rejection(*a, None)])
def test_without_drafts_one_token_comes_out(verify):
    verified = verify(torch.tensor([[0.0, 50.0, 0.0]]), SampleState(PLAIN, 0, 0, 1, [0]), ())
    assert verified == Verified((1,), 0)


@pytest.mark.parametrize("verify", [verify_exact, lambda *a: verify_rejection(*a, None)])
def test_greedy_drafts_stand_iff_they_are_the_argmax(verify):
    rows = torch.eye(5)[[2, 4, 1]]
    state = SampleState(replace(PLAIN, temperature=0.0), 0, 0, 1, [0])
    assert verify(rows, state, (2, 4)) == Verified((2, 4, 1), 2)
    assert verify(rows, state, (2, 3)) == Verified((2, 4), 1)
    assert verify(rows, state, (0, 4)) == Verified((2,), 0)
    rows[0, 0] = torch.nan
    with pytest.raises(LogitsError):
        verify(rows, state, (2, 4))


def random_distribution(rng, size):
    """Dirichlet with some exact zeros, at times very uneven."""
    weights = rng.gamma(float(rng.choice([0.05, 0.3, 1.0, 30.0])), size=size)
    weights[rng.random(size) < 0.3] = 0
    weights[rng.integers(size)] += 1e-3
    return weights / weights.sum()


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_accept_and_residual_give_the_target_exactly(seed, size):
    # draft * min(1, target / draft) + P[reject] * residual == target, token by token
    rng = np.random.default_rng(seed)
    target, draft = random_distribution(rng, size), random_distribution(rng, size)
    drawn = draft > 0
    accepted = np.zeros(size)
    accepted[drawn] = draft[drawn] * accept_probability(target[drawn], draft[drawn])
    law = accepted + (1 - accepted.sum()) * residual(target, draft)
    # All terms are at most 1; the sums of size terms are off by size epsilons at most.
    np.testing.assert_allclose(law, target, rtol=0, atol=2 * size * EPS)
    left = residual(target, draft)
    if (target > draft).any():  # rounding can hide it even where the two differ
        assert ((left == 0) | (target > draft)).all()
    assert (left >= 0).all()
    assert abs(left.sum() - 1) <= size * EPS


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_accept_and_residual_of_a_certain_proposal(seed, size):
    rng = np.random.default_rng(seed)
    target = random_distribution(rng, size)
    token = int(rng.integers(size))
    assume(target[token] < 1)
    draft = np.eye(size)[token]
    assert accept_probability(target[token], draft[token]) == target[token]
    want = np.where(np.arange(size) == token, 0, target) / (1 - target[token])
    np.testing.assert_allclose(
        residual(target, draft), want, rtol=0, atol=2 * size * EPS / (1 - target[token])
    )


def test_the_residual_of_equal_distributions_is_the_target():
    target = np.array([0.25, 0.75])
    assert residual(target, target).tolist() == [0.25, 0.75]


def speculative(seed, model, draft_model, rules, certain):
    """Two tokens by rejection sampling, with two drafts; the second plainly if it is missing."""
    state = SampleState(rules, seed, 0, 1, [0])
    drafts, probs = [], []
    for _ in range(2):
        guess = model if certain else draft_model
        probs.append(distribution(rows_after(guess, state.token_ids, drafts)[-1], state, drafts))
        if certain:
            drafts.append(int(probs[-1].argmax()))
        else:
            drafts.append(draw_draft(probs[-1], state, state.position(len(drafts))))
    rows = rows_after(model, state.token_ids, drafts)
    verified = verify_rejection(rows, state, drafts, None if certain else torch.stack(probs))
    assert verified == verify_rejection(
        rows, state, tuple(drafts), None if certain else torch.stack(probs)
    )
    assert verified.tokens[: verified.num_accepted] == tuple(drafts[: verified.num_accepted])
    assert len(verified.tokens) == verified.num_accepted + 1
    state.append(verified.tokens)
    if len(verified.tokens) == 1:
        row = rows_after(model, state.token_ids, ())
        state.append(verify_rejection(row, state, (), None).tokens)
    return state.token_ids[1:3], verified.num_accepted


def exact(seed, model, draft_model, rules):
    """Two tokens by exact acceptance, the drafter sharing the noise."""
    state = SampleState(rules, seed, 0, 1, [0])
    drafts = []
    for _ in range(2):
        row = rows_after(draft_model, state.token_ids, drafts)[-1]
        drafts.append(sample(row, state, drafts))
    verified = verify_exact(rows_after(model, state.token_ids, drafts), state, drafts)
    state.append(verified.tokens)
    if len(verified.tokens) == 1:
        row = rows_after(model, state.token_ids, ())
        state.append(verify_exact(row, state, ()).tokens)
    return state.token_ids[1:3], verified.num_accepted


@pytest.mark.parametrize("mode", ["exact", "rejection", "rejection of certain drafts"])
def test_pairs_of_tokens_are_distributed_as_the_target(mode):
    rules = SamplingRules(temperature=0.8, top_k=3, presence_penalty=0.5)
    model, draft_model, draws = table(11), table(12), 2000
    law = np.zeros((V, V))
    state = SampleState(rules, 0, 0, 1, [0])
    first = distribution(rows_after(model, [0], ())[0], state).numpy()
    for token in np.flatnonzero(first):
        row = rows_after(model, [0, int(token)], ())[0]
        law[token] = first[token] * distribution(row, state, [int(token)]).numpy()
    counts, accepted = np.zeros((V, V)), 0
    for seed in range(draws):
        if mode == "exact":
            pair, num_accepted = exact(seed, model, draft_model, rules)
        else:
            certain = mode != "rejection"
            pair, num_accepted = speculative(seed, model, draft_model, rules, certain)
        counts[tuple(pair)] += 1
        accepted += num_accepted
    possible = law > 0
    assert counts[~possible].sum() == 0
    assert (draws * law[possible]).min() > 5
    assert chi_square(counts[possible], draws * law[possible]) < 31.8  # 8 degrees: p = 1e-4
    assert 0.1 < accepted / (2 * draws) < 0.9  # both outcomes were seen


def test_an_error_comes_where_plain_decoding_has_it():
    """Row 1 has no valid token: what row 0 gave stands, and the error waits for the next step."""
    state = SampleState(SamplingRules(temperature=0.0), 0, 0, 1, [3])
    logits_RV = torch.zeros(3, 8)
    logits_RV[0, 5] = 1.0
    logits_RV[1, 2] = float("nan")
    assert verify_exact(logits_RV, state, (5, 6)) == Verified((5,), 0)
    with pytest.raises(LogitsError):
        verify_exact(logits_RV[1:], state, (6,))
    # A later row that no accepted prefix reaches is not looked at.
    assert verify_exact(logits_RV, state, (4, 6)) == Verified((5,), 0)
