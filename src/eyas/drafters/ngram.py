"""Prompt lookup: the draft is what followed the same n-gram earlier in the request's own text
(Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference")."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.drafters.base import Draft, DraftContext, FeatureRequest
from eyas.models.base import Model
from eyas.ops.base import Ops

_LONGEST = 64


@dataclass(frozen=True, slots=True)
class Options:
    """The lengths of the n-grams to look up, in tokens: the longest first."""

    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be an integer of at least 1")
            if value > _LONGEST:
                raise ValueError(
                    f"{name} is {value}: at most {_LONGEST} is taken, as each length costs memory "
                    "and so long a match is found by its end as well"
                )
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ValueError(
                f"prompt_lookup_max is {self.prompt_lookup_max}, less than prompt_lookup_min "
                f"({self.prompt_lookup_min}): raise one or lower the other"
            )


@dataclass(slots=True)
class _Index:
    """For each n-gram of a request, where its latest occurrence was followed by a token."""

    next_position: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 0  # continuations at positions below this are indexed


class NgramDrafter:
    """Longest match first; among equal lengths the latest, as text repeats what is near."""

    needs = FeatureRequest()

    def __init__(self, options: Options) -> None:
        self._sizes = range(options.prompt_lookup_min, options.prompt_lookup_max + 1)
        self._indices: dict[str, _Index] = {}

    def propose(self, context: DraftContext) -> list[Draft]:
        drafts = []
        for request in context.requests:
            tokens = request.state.token_ids
            if not request.max_drafts:
                drafts.append(Draft(()))
                continue
            index = self._indices.setdefault(request.request_id, _Index())
            self._extend(index, tokens)
            drafts.append(Draft(self._continue(index, tokens, request.max_drafts)))
        return drafts

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._indices.pop(request_id, None)

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        for position in range(max(1, index.length), len(tokens)):
            for size in self._sizes:
                if size <= position:
                    index.next_position[tuple(tokens[position - size : position])] = position
        index.length = len(tokens)

    def _continue(self, index: _Index, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        for size in reversed(self._sizes):
            if size > len(tokens):
                continue
            start = index.next_position.get(tuple(tokens[-size:]))
            if start is not None:
                period = len(tokens) - start
                # A match that reaches the end of the text goes on into the draft itself.
                return tuple(tokens[start + i % period] for i in range(count))
        return ()


def create(options: Options, target: Model, ops: Ops, acceptance: str) -> NgramDrafter:
    """``target``, ``ops`` and ``acceptance`` are unused: tokens alone decide this draft."""
    return NgramDrafter(options)
