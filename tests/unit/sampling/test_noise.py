from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import chi_square

from eyas import _core
from eyas.sampling.noise import (
    Domain,
    gumbel,
    gumbel_from_uniform,
    uniform,
    unit_interval,
)

EPS = np.finfo(np.float64).eps
word = st.integers(0, 2**32 - 1)

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return [int(part, 16) for part in text.split()]


def philox_in_integers(counter, key):
    """The paper's definition, one counter at a time."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for step in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        key0 = (k0 + step * 0x9E3779B9) % 2**32
        key1 = (k1 + step * 0xBB67AE85) % 2**32
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
    return [c0, c1, c2, c3]


def exact_gumbel(numerator):
    """-log(-log((2 * numerator + 1) / 2^53)) to 40 digits."""
    with localcontext() as context:
        context.prec = 60
        return -(-(Decimal(2 * numerator + 1) / 2**53).ln()).ln()


def numbers_in_integers(stream, token_ids):
    """The 52 bits of each id, by the documented layout."""
    seed, position, sample_index, domain = stream
    numbers = []
    for token in token_ids:
        counter = (token // 2, position, sample_index, domain)
        block = philox_in_integers(counter, (seed % 2**32, seed // 2**32))
        high, low = block[2:] if token % 2 else block[:2]
        numbers.append(high << 20 | low >> 12)
    return numbers


def native_bits(isa, stream, token_ids):
    ids = np.array(token_ids, np.int64)
    bits = np.full(len(ids) + 1, -1)
    _core.random_bits(isa, stream, ids.ctypes.data, len(ids), bits.ctypes.data)
    assert bits[-1] == -1
    return bits[:-1].tolist()


def native_loud(isa, stream, num_ids, floor):
    found = np.full((2, num_ids + 1), -1)
    ids, bits = found
    count = _core.loud_bits(isa, stream, num_ids, floor, ids.ctypes.data, bits.ctypes.data)
    assert (found[:, count:] == -1).all()
    return found[:, :count].tolist()


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter, key, result):
    block, position, sample_index, domain = words(counter)
    key0, key1 = words(key)
    w0, w1, w2, w3 = words(result)
    assert philox_in_integers(words(counter), words(key)) == [w0, w1, w2, w3]
    stream = (key1 << 32 | key0, position, sample_index, domain)
    for isa in _core.instruction_sets():
        got = native_bits(isa, stream, [2 * block, 2 * block + 1])
        assert got == [w0 << 20 | w1 >> 12, w2 << 20 | w3 >> 12]


streams = st.tuples(st.integers(0, 2**64 - 1), word, word, word)


@pytest.mark.parametrize("isa", _core.instruction_sets())
@given(streams, st.lists(st.integers(0, 2**33 - 1), max_size=150))
def test_native_numbers_are_those_of_each_id(isa, stream, token_ids):
    assert native_bits(isa, stream, token_ids) == numbers_in_integers(stream, token_ids)


@pytest.mark.parametrize("isa", _core.instruction_sets())
@given(streams, st.integers(1, 300), st.data())
def test_native_loud_numbers_are_those_whose_leading_word_reaches_the_floor(
    isa, stream, num_ids, data
):
    numbers = numbers_in_integers(stream, range(num_ids))
    floor = data.draw(word | st.sampled_from([number >> 20 for number in numbers]))
    loud = [token for token, number in enumerate(numbers) if number >> 20 >= floor]
    assert native_loud(isa, stream, num_ids, floor) == [loud, [numbers[token] for token in loud]]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), word)
def test_gumbel_has_the_documented_layout(seed, sample_index, position, token):
    number = numbers_in_integers((seed % 2**64, position, sample_index, 0), [token])[0]
    got = gumbel(seed, sample_index, position, np.array([token]))[0]
    want = float(exact_gumbel(number))
    assert abs(got - want) <= 4 * EPS * max(1.0, abs(want))


@pytest.mark.parametrize("domain", list(Domain))
def test_uniform_has_the_documented_layout(domain):
    high, low, _, _ = philox_in_integers((0, 7, 2, int(domain)), (5, 1))
    want = ((high << 20 | low >> 12) + 0.5) / 2**52
    assert uniform(5 + 2**32, 2, 7, domain) == want


@given(st.integers(1, 40000), st.integers(0, 2**32), st.data())
def test_a_subset_gets_the_bits_of_the_whole_vocabulary(vocab_size, seed, data):
    ids = np.array(data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=20)), np.int64)
    whole = gumbel(seed, 1, 3, np.arange(vocab_size))
    assert whole.shape == (vocab_size,)
    assert np.array_equal(whole[ids], gumbel(seed, 1, 3, ids))
    assert np.array_equal(whole[::-3], gumbel(seed, 1, 3, np.arange(vocab_size)[::-3]))


@pytest.mark.parametrize("high", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
@pytest.mark.parametrize("low", [0, 2**12, 2**32 - 1])
def test_every_word_gives_finite_noise_to_full_precision(high, low):
    # Absolute error of -log(E) is the relative error of E = -log(u): the upper tail, u near 1, is
    # where a float32 or a rounded 1 - u would fail.
    number = high << 20 | low >> 12
    u = unit_interval(np.array([number]))
    assert 0 < u[0] < 1
    got = gumbel_from_uniform(u)[0]
    want = float(exact_gumbel(number))
    assert abs(got - want) <= 4 * EPS * max(1.0, abs(want))


def test_the_tails_are_those_of_52_bits():
    low, high = gumbel_from_uniform(unit_interval(np.array([0, 2**52 - 1])))
    assert low == pytest.approx(-3.604, abs=1e-3)  # -log(53 log 2)
    assert high == pytest.approx(36.737, abs=1e-3)  # 53 log 2


def test_every_argument_changes_the_noise():
    draws = {
        gumbel(seed, sample_index, position, np.array([token]))[0]
        for seed in (0, 1, 2**32, -1)
        for sample_index in (0, 1)
        for position in (0, 1)
        for token in (0, 1, 2, 3)
    }
    assert len(draws) == 4 * 2 * 2 * 4
    assert len({uniform(0, 0, 0, domain) for domain in Domain}) == len(Domain)


def test_noise_is_distributed_as_gumbel():
    noise = np.concatenate([gumbel(seed, 0, 1, np.arange(5000)) for seed in range(20)])
    cells = np.floor(np.exp(-np.exp(-noise)) * 32).astype(int)  # the distribution function
    counts = np.bincount(cells, minlength=32).tolist()
    assert chi_square(counts, [len(noise) / 32] * 32) < 68  # 31 degrees: p = 1e-4
    pairs = np.bincount(cells[0::2] // 4 * 8 + cells[1::2] // 4, minlength=64).tolist()
    assert chi_square(pairs, [len(noise) / 128] * 64) < 114  # 63 degrees: p = 1e-4
