"""Compare two runs of the same requests: token ids, and log-probabilities bit for bit."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyas.engine.output import CompletionOutput, RequestOutput


@dataclass(slots=True)
class Comparison:
    """How much was compared, and the differences, in the order they were found."""

    num_tokens: int = 0
    num_logprobs: int = 0
    differences: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        expected: Sequence["RequestOutput"],
        actual: Sequence["RequestOutput"],
    ) -> None:
        """Compare the run called ``name`` with the reference run, request by request."""
        assert len(expected) == len(actual)
        for i, (left, right) in enumerate(zip(expected, actual, strict=True)):
            where = f"{name}, request {i + 1}"
            self._add_sample(where, left.outputs[0], right.outputs[0])

    def _add_sample(
        self, where: str, expected: "CompletionOutput", actual: "CompletionOutput"
    ) -> None:
        """Only the first difference of a request counts: what follows it has another prefix."""
        count = max(len(expected.token_ids), len(actual.token_ids))
        for i in range(count):
            left, right = _token(expected, i), _token(actual, i)
            self.num_tokens += 1
            if left != right:
                self.differences.append(f"{where}, token {i}: {_end(left)} became {_end(right)}")
                return
            if difference := self._logprobs_differ(expected, actual, i):
                self.differences.append(f"{where}, token {i} ({left}): {difference}")
                return

    def _logprobs_differ(
        self, expected: "CompletionOutput", actual: "CompletionOutput", i: int
    ) -> str | None:
        assert expected.logprobs is not None
        assert actual.logprobs is not None
        left, right = expected.logprobs[i], actual.logprobs[i]
        if left.keys() != right.keys():
            return f"top tokens {sorted(left)} became {sorted(right)}"
        for token_id, value in left.items():
            self.num_logprobs += 1
            before, after = value.logprob, right[token_id].logprob
            if bits(before) != bits(after):
                return f"log-probability of {token_id}: {before!r} became {after!r}"
        return None


def bits(value: float) -> bytes:
    """A float's eight bytes: unlike ==, they tell 0.0 from -0.0 and find NaN equal to itself."""
    return struct.pack("<d", value)


def _token(output: "CompletionOutput", i: int) -> int | None:
    return output.token_ids[i] if i < len(output.token_ids) else None


def _end(token_id: int | None) -> str:
    return "the end" if token_id is None else f"token {token_id}"
