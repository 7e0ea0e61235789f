"""Test drafters: they know a request's plain continuation, and use it well, badly or randomly."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

from eyas.drafters.base import Draft, DraftContext, FeatureRequest


class ScriptedDrafter:
    """Proposes what ``choose(right_token, position)`` makes of plain decoding's tokens.

    ``script`` maps a prompt (a tuple of ids) to prompt + plain output; beyond its end the right
    token is taken to be 0.
    """

    needs = FeatureRequest()

    def __init__(
        self,
        script: Mapping[tuple[int, ...], Sequence[int]],
        choose: Callable[[int, int], int],
    ) -> None:
        self._script = script
        self._choose = choose

    def propose(self, context: DraftContext) -> list[Draft]:
        drafts = []
        for request in context.requests:
            state = request.state
            right = self._script[tuple(state.token_ids[: state.num_prompt_tokens])]
            start = len(state.token_ids)
            positions = range(start, start + request.max_drafts)
            drafts.append(
                Draft(tuple(self._choose(right[i] if i < len(right) else 0, i) for i in positions))
            )
        return drafts

    def forget(self, request_ids: Sequence[str]) -> None:
        """Keeps nothing."""


def always_right(token: int, position: int) -> int:
    return token


def always_wrong(vocab_size: int) -> Callable[[int, int], int]:
    return lambda token, position: (token + 1) % vocab_size


def random_mix(vocab_size: int, seed: int, share: float = 0.6) -> Callable[[int, int], int]:
    """Right with probability ``share``, else some other token; a function of seed and position."""

    def choose(token: int, position: int) -> int:
        digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        return token if number % 1000 < share * 1000 else number // 1000 % vocab_size

    return choose
