"""The pruned draw against the noise of every candidate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.sampling.gumbel_max import gumbel_max
from eyas.sampling.noise import (
    SMALLEST_GUMBEL,
    gumbel,
    gumbel_from_uniform,
    loud_gumbel,
    unit_interval,
)
from eyas.sampling.processors import Candidates

SEED, SAMPLE, POSITION = -77, 2, 31


def brute_force(left, vocab_size):
    noise_V = gumbel(SEED, SAMPLE, POSITION, np.arange(vocab_size))
    return int(left.ids[np.argmax(left.log_weights + noise_V[left.ids])])


def draw(left, vocab_size):
    return gumbel_max(left, vocab_size, SEED, SAMPLE, POSITION)


def spread(kind, rng, size):
    """Log-weights of some shape, the best of them 0."""
    weights = {
        "flat": lambda: np.zeros(size),
        "two levels": lambda: -12.0 * (rng.random(size) < 0.99),
        "steps": lambda: -np.floor(rng.exponential(8, size)),
        "normal": lambda: rng.normal(0, 1, size),
        "steep": lambda: rng.normal(0, 9, size),
        "cold": lambda: rng.normal(0, 1, size) * 1e9,
        "coldest": lambda: -np.minimum(rng.exponential(1, size), 1.7) * 1e308,
        "one": lambda: np.where(np.arange(size) == size - 1, 0.0, -60.0),
    }[kind]()
    return weights - weights.max()


@pytest.mark.parametrize(
    "kind", ["flat", "two levels", "steps", "normal", "steep", "cold", "coldest", "one"]
)
@given(st.integers(0, 2**32), st.integers(1, 12000), st.sampled_from([1.0, 0.7, 0.4]))
def test_is_the_argmax_over_all_candidates(kind, row_seed, vocab_size, share):
    rng = np.random.default_rng(row_seed)
    ids = np.flatnonzero(rng.random(vocab_size) < share)
    ids = ids if len(ids) else np.arange(1)
    left = Candidates(ids, spread(kind, rng, len(ids)))
    assert draw(left, vocab_size) == brute_force(left, vocab_size)


@pytest.mark.parametrize("vocab_size", [49152, 40001])
@pytest.mark.parametrize("kind", ["flat", "steps", "normal", "steep"])
def test_over_a_vocabulary_of_several_passes(vocab_size, kind):
    left = Candidates(
        np.arange(vocab_size), spread(kind, np.random.default_rng(vocab_size), vocab_size)
    )
    assert draw(left, vocab_size) == brute_force(left, vocab_size)


@given(st.integers(0, 2**32), st.integers(4097, 9000))
def test_of_equal_totals_the_lowest_id_wins(row_seed, vocab_size):
    # Weights that undo the noise: every other total or so is 1, to the last bit.
    noise_V = gumbel(SEED, SAMPLE, POSITION, np.arange(vocab_size))
    weights_V = 1 - noise_V
    behind = np.random.default_rng(row_seed).random(vocab_size) < 0.5
    weights_V[behind | (weights_V + noise_V != 1)] -= 0.5
    totals_V = weights_V + noise_V
    assert (totals_V == totals_V.max()).sum() > 100
    left = Candidates(np.arange(vocab_size), weights_V)
    assert draw(left, vocab_size) == int(np.argmax(totals_V))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 6000), st.data())
def test_every_noise_from_the_least_on_is_found(seed, num_ids, data):
    noise_V = gumbel(seed, 1, 5, np.arange(num_ids))
    ranked = np.sort(noise_V)
    least = float(ranked[data.draw(st.integers(0, len(ranked) - 1))])  # exactly that of some token
    ids, noise = loud_gumbel(seed, 1, 5, num_ids, least)
    assert (np.diff(ids) > 0).all()
    assert set(np.flatnonzero(noise_V >= least)) <= set(ids.tolist())
    assert (noise_V[ids] == noise).all()
    assert (noise > least - 0.01).all()  # the few others are close


def test_the_ends_of_what_noise_can_be_needed():
    ids, noise = loud_gumbel(3, 0, 0, 301, SMALLEST_GUMBEL)
    assert ids.tolist() == list(range(301))
    assert (noise == gumbel(3, 0, 0, ids)).all()
    ids, noise = loud_gumbel(3, 0, 0, 301, 1e308)
    assert ids.tolist() == noise.tolist() == []


def test_no_noise_is_below_the_smallest():
    smallest = gumbel_from_uniform(unit_interval(np.array([0])))[0]
    assert SMALLEST_GUMBEL < smallest < SMALLEST_GUMBEL + 0.01
