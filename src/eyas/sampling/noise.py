"""Randomness as a pure function: Philox4x32-10 over (seed, sample, position, token), no streams.

Counter layout, four 32-bit words; the key is the seed's 64 bits (low word, high word)::

    word 0   block: token id >> 1 for per-token noise, 0 for single draws
    word 1   output position (0 is the first generated token)
    word 2   sample index (which of the n samples of the request)
    word 3   domain: what the number is for, see Domain

One block gives four words, that is two numbers of 52 bits: words 0 and 1 for even token ids,
words 2 and 3 for odd ones.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_CHUNK = 16384  # ids per pass: the pass stays in the cache; even, as a block serves two ids

Words = npt.NDArray[np.uint64]  # 32-bit values, held in 64 bits so that products do not overflow
FourWords = tuple[Words, Words, Words, Words]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class Domain(IntEnum):
    """Separate streams, so that no number is ever used for two decisions."""

    GUMBEL = 0  # the noise of the exact mode and of plain sampling, per token
    ACCEPT = 1  # rejection mode: accept or reject a draft
    TARGET = 2  # rejection mode: the correction or bonus token
    DRAFT = 3  # rejection mode: the drafter's proposal


def philox(counter: FourWords, key: tuple[int, int]) -> FourWords:
    """Philox4x32-10 of each counter (four arrays that broadcast together) under one key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _WORD_BITS) ^ c1 ^ np.uint64(k0)
        c2 = (product0 >> _WORD_BITS) ^ c3 ^ np.uint64(k1)
        c1 = product1 & _WORD
        c3 = product0 & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def unit_interval(high: Words, low: Words) -> Floats:
    """Uniforms (r + 1/2) / 2^52 from the leading 52 bits r of two words: exact, never 0 or 1.

    The grid is even, and 1 - u lies on it too, so both tails are resolved to 2^-53.
    """
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (bits.view(np.int64).astype(np.float64) + 0.5) * 2.0**-52


def gumbel_from_uniform(uniform: Floats) -> Floats:
    """Standard Gumbel noise -log(-log(u)); finite for every u of ``unit_interval``.

    The upper tail is u near 1, where u is exact and log(u) therefore has full relative precision:
    the same value as log1p(u - 1), at a quarter of the cost.
    """
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def gumbel(seed: int, sample_index: int, position: int, ids: Ids | int) -> Floats:
    """Noise G(seed, sample_index, position, id) for the given token ids, or for 0 .. ids - 1.

    A pure function of each id: whichever ids are asked for together, the bits are the same.
    """
    if isinstance(ids, int):
        noise_V = np.empty(ids)
        for start in range(0, ids, _CHUNK):
            size = min(_CHUNK, ids - start)
            blocks = np.arange(start >> 1, (start + size + 1) >> 1)
            pairs = np.stack(_pairs(seed, sample_index, position, blocks), axis=1)
            noise_V[start : start + size] = gumbel_from_uniform(pairs.ravel()[:size])
        return noise_V
    even, odd = _pairs(seed, sample_index, position, ids >> 1)
    return gumbel_from_uniform(np.where(ids & 1, odd, even))


def uniform(seed: int, sample_index: int, position: int, domain: Domain) -> float:
    """One number strictly between 0 and 1."""
    first, _ = _pairs(seed, sample_index, position, np.zeros(1, np.int64), domain)
    return float(first[0])


def _pairs(
    seed: int, sample_index: int, position: int, blocks: Ids, domain: Domain = Domain.GUMBEL
) -> tuple[Floats, Floats]:
    """The two uniforms of each block."""
    assert 0 <= position < 2**32, position
    assert 0 <= sample_index < 2**32, sample_index
    counter = (
        blocks.astype(np.uint64),
        np.array([position], np.uint64),
        np.array([sample_index], np.uint64),
        np.array([domain], np.uint64),
    )
    w0, w1, w2, w3 = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return unit_interval(w0, w1), unit_interval(w2, w3)
