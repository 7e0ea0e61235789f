"""What the processors need to know of a prefix, kept up to date at the cost of its new tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens before the one to be sampled, in the form that the processors read.

    ``num_output`` counts the output tokens and ``tail`` holds the last of them, as many as the
    longest bad word needs. ``seen``: the distinct tokens of prompt and output, kept only for a
    repetition penalty. ``output_ids`` and ``output_counts``: the distinct output tokens and how
    often each occurs, kept only for a presence or frequency penalty.
    """

    num_output: int
    tail: tuple[int, ...]
    seen: Ids
    output_ids: Ids
    output_counts: Ids


class TokenCounts:
    """The distinct tokens of a growing sequence and how often each occurs; O(1) a token."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._slots: dict[int, int] = {}  # token id -> its place in the arrays below
        self._ids = np.empty(16, np.int64)
        self._counts = np.empty(16, np.int64)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = len(self._slots)
                if slot == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * slot)
                    self._counts = np.resize(self._counts, 2 * slot)
                self._ids[slot] = token
                self._counts[slot] = 0
            self._counts[slot] += 1

    def with_extra(self, extra: Sequence[int]) -> tuple[Ids, Ids]:
        """Distinct ids and their counts as if ``extra`` followed; this object does not change."""
        size = len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        if not extra:
            return ids, counts
        new = [token for token in dict.fromkeys(extra) if token not in self._slots]
        new_slots = {token: size + i for i, token in enumerate(new)}
        ids = np.concatenate([ids, np.array(new, np.int64)])
        counts = np.concatenate([counts, np.zeros(len(new), np.int64)])
        for token in extra:
            counts[self._slots[token] if token in self._slots else new_slots[token]] += 1
        return ids, counts
