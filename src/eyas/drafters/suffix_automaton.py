"""An automaton of all suffixes of a growing token sequence: where the text has been before, and
what followed there (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a
text").

Each state is a set of substrings that always occur together, ``length`` being its longest.
``link`` leads to the longest suffix of it that also occurs elsewhere. Adding a token takes constant
time on average, and a text of n tokens has at most 2 n states, so matches may be of any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_COUNTED_CONTEXTS = 16  # bounds the work per token in repetitive text, where links form long chains


@dataclass(frozen=True, slots=True)
class Continuation:
    """What may follow a text: ``tokens``, ``expected`` how many of them will be accepted if the
    future is like the past, ``match`` the length of the context that this rests on."""

    tokens: tuple[int, ...] = ()
    expected: float = 0.0
    match: int = 0


class SuffixAutomaton:
    """States are indices into parallel lists; state 0 is the empty string."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]
        self._again: list[dict[int, int]] = [{}]  # how often a token followed after its first time
        self._length = [0]
        self._link = [-1]
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._count(token)
            self._append(token)

    def separate(self) -> None:
        """Ends a text: the next one starts at the empty string, and no match spans the two."""
        self._last = 0

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The state of the longest suffix of ``tokens`` that occurs here, and its length."""
        state, length = 0, 0
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return state, length

    def repeated(self) -> tuple[int, int]:
        """The state of the longest suffix of the text that occurred before, and its length."""
        state = max(self._link[self._last], 0)
        return state, self._length[state]

    def continuation(
        self, state: int, match: int, limit: int, factor: float, least: float
    ) -> Continuation:
        """At most ``limit`` tokens after ``state``, each the one that most often followed (of
        equals, the one first seen later), as long as their number is at most ``factor`` times the
        matched context and their joint frequency at least ``least`` (Oliaro et al. 2024, section
        3.2)."""
        tokens: list[int] = []
        expected, joint = 0.0, 1.0
        count = min(limit, int(factor * match))
        while len(tokens) < count:
            while state > 0 and not self._next[state]:  # the text's own end: a shorter context
                state = self._link[state]
            if state <= 0:
                break
            again = self._again[state]
            seen = {token: 1 + again.get(token, 0) for token in self._next[state]}
            token = max(reversed(seen), key=seen.__getitem__)
            joint *= seen[token] / sum(seen.values())
            if joint < least:
                break
            tokens.append(token)
            expected += joint
            state = self._next[state][token]
        return Continuation(tuple(tokens), expected, match)

    def _count(self, token: int) -> None:
        """``token`` follows the text: seen again after each context that it followed before."""
        state = self._last
        for _ in range(_COUNTED_CONTEXTS):
            if state <= 0:
                return
            if token in self._next[state]:
                again = self._again[state]
                again[token] = again.get(token, 0) + 1
            state = self._link[state]

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        previous = self._last
        existing = self._next[previous].get(token)
        if existing is not None:  # only after separate(): the text begins as an earlier one did
            self._last = (
                existing
                if self._length[existing] == self._length[previous] + 1
                else self._split(previous, token, existing)
            )
            return
        state = self._add(self._length[previous] + 1, {}, {})
        while previous >= 0 and token not in self._next[previous]:
            self._next[previous][token] = state
            previous = self._link[previous]
        if previous < 0:
            self._link[state] = 0
        else:
            existing = self._next[previous][token]
            if self._length[existing] == self._length[previous] + 1:
                self._link[state] = existing
            else:
                self._link[state] = self._split(previous, token, existing)
        self._last = state

    def _split(self, previous: int, token: int, existing: int) -> int:
        """Parts the shorter strings of ``existing``, which now occur without its longer ones."""
        clone = self._add(
            self._length[previous] + 1, dict(self._next[existing]), dict(self._again[existing])
        )
        self._link[clone] = self._link[existing]
        self._link[existing] = clone
        while previous >= 0 and self._next[previous].get(token) == existing:
            self._next[previous][token] = clone
            previous = self._link[previous]
        return clone

    def _add(self, length: int, following: dict[int, int], again: dict[int, int]) -> int:
        self._next.append(following)
        self._again.append(again)
        self._length.append(length)
        self._link.append(-1)
        return len(self._length) - 1
