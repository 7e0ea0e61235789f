"""Randomness as a pure function: Philox4x32-10 over (seed, sample, position, token), no streams.

Counter layout, four 32-bit words; the key is the seed's 64 bits (low word, high word)::

    word 0   block: token id >> 1 for per-token noise, 0 for single draws
    word 1   output position (0 is the first generated token)
    word 2   sample index (which of the n samples of the request)
    word 3   domain: what the number is for, see Domain

One block gives four words, that is two numbers of 52 bits: words 0 and 1 for even token ids,
words 2 and 3 for odd ones. csrc/philox.* computes these integers; the rest is numpy in float64.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

import math
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from eyas import _core

SMALLEST_GUMBEL = -3.61  # below -log(-log(2^-53)) = -3.6040, the noise of the least uniform
_INSTRUCTION_SET = _core.instruction_sets()[0]  # the fastest; all give the same integers

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class Domain(IntEnum):
    """Separate streams, so that no number is ever used for two decisions."""

    GUMBEL = 0  # the noise of the exact mode and of plain sampling, per token
    ACCEPT = 1  # rejection mode: accept or reject a draft
    TARGET = 2  # rejection mode: the correction or bonus token
    DRAFT = 3  # rejection mode: the drafter's proposal


def unit_interval(bits: Ids) -> Floats:
    """Uniforms (bits + 1/2) / 2^52 from random numbers of 52 bits: exact, never 0 or 1.

    The grid is even, and 1 - u lies on it too, so both tails are resolved to 2^-53.
    """
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def gumbel_from_uniform(uniform: Floats) -> Floats:
    """Standard Gumbel noise -log(-log(u)); finite for every u of ``unit_interval``.

    The upper tail is u near 1, where u is exact and log(u) therefore has full relative precision:
    the same value as log1p(u - 1), at a quarter of the cost.
    """
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def gumbel(seed: int, sample_index: int, position: int, ids: Ids) -> Floats:
    """Noise G(seed, sample_index, position, id) of each token id.

    A pure function of each id: whichever ids are asked for together, the bits are the same.
    """
    return gumbel_from_uniform(_uniforms(seed, sample_index, position, Domain.GUMBEL, ids))


def loud_gumbel(
    seed: int, sample_index: int, position: int, num_ids: int, least: float
) -> tuple[Ids, Floats]:
    """Of the ids 0 .. num_ids - 1, ascending, those whose noise is ``least`` or more, and a few
    others; and their noise, with ``gumbel``'s bits.

    Noise grows with its uniform u, so it reaches ``least`` only if u reaches exp(-exp(-least)), and
    the leading word the floor of 2^32 times that. The allowance is for rounding: less than 2^-40 in
    a noise, and in a ``least`` that any noise is near.
    """
    assert least >= SMALLEST_GUMBEL, least
    lowest = math.floor(2**32 * math.exp(-math.exp(1e-6 - least))) - 1
    stream = _stream(seed, sample_index, position, Domain.GUMBEL)
    ids, bits = np.empty((2, num_ids), np.int64)
    addresses = ids.ctypes.data, bits.ctypes.data
    count = _core.loud_bits(_INSTRUCTION_SET, stream, num_ids, max(lowest, 0), *addresses)
    return ids[:count], gumbel_from_uniform(unit_interval(bits[:count]))


def uniform(seed: int, sample_index: int, position: int, domain: Domain) -> float:
    """One number strictly between 0 and 1."""
    return float(_uniforms(seed, sample_index, position, domain, np.zeros(1, np.int64))[0])


def _uniforms(seed: int, sample_index: int, position: int, domain: Domain, ids: Ids) -> Floats:
    ids = np.ascontiguousarray(ids, np.int64)
    bits = np.empty_like(ids)
    stream = _stream(seed, sample_index, position, domain)
    _core.random_bits(_INSTRUCTION_SET, stream, ids.ctypes.data, len(ids), bits.ctypes.data)
    return unit_interval(bits)


def _stream(
    seed: int, sample_index: int, position: int, domain: Domain
) -> tuple[int, int, int, int]:
    assert 0 <= position < 2**32, position
    assert 0 <= sample_index < 2**32, sample_index
    return seed % 2**64, position, sample_index, domain
