"""Suffix decoding: the draft is what followed the longest earlier match of the text's end, in the
request itself or in earlier outputs, and is as long as the match deserves (Oliaro et al. 2024,
"SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications").

n-gram lookup looks at a few tokens and always drafts all K. Here the match may be of any length,
what followed most often wins, and a short or ambiguous match drafts little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.drafters.base import Draft, DraftContext, FeatureRequest
from eyas.drafters.suffix_automaton import Continuation, SuffixAutomaton
from eyas.models.base import Model
from eyas.ops.base import Ops

_NOTHING = Continuation()


@dataclass(frozen=True, slots=True)
class Options:
    """vLLM's names. ``suffix_decoding_max_tree_depth``: how many last tokens are matched against
    earlier outputs. ``suffix_decoding_max_cached_requests``: how many earlier outputs are kept; 0
    keeps none, which is the default, since what one user's request is drafted from shows in
    another's time. ``suffix_decoding_max_spec_factor``: draft tokens per matched token.
    ``suffix_decoding_min_token_prob``: the joint frequency below which a draft ends."""

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (
            ("suffix_decoding_max_tree_depth", 1),
            ("suffix_decoding_max_cached_requests", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}: it must be an integer of at least {least}")
        factor = self.suffix_decoding_max_spec_factor
        if not _is_number(factor) or not 0 < factor <= 1e6:
            raise ValueError(
                f"suffix_decoding_max_spec_factor is {factor!r}: it must be a number above 0 "
                "(tokens drafted per token matched)"
            )
        least_prob = self.suffix_decoding_min_token_prob
        if not _is_number(least_prob) or not 0 <= least_prob <= 1:
            raise ValueError(
                f"suffix_decoding_min_token_prob is {least_prob!r}: it must be in [0, 1]"
            )


@dataclass(slots=True)
class _Text:
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    tokens: Sequence[int] = ()
    num_prompt_tokens: int = 0


class EarlierOutputs:
    """Finished outputs in two generations: when the younger has half of what may be kept, it
    becomes the older, whose outputs are dropped together."""

    def __init__(self, max_requests: int) -> None:
        self._half = -(-max_requests // 2)
        self._young, self._old = SuffixAutomaton(), SuffixAutomaton()
        self._num_young = 0

    def add(self, tokens: Sequence[int]) -> None:
        if not self._half or not tokens:
            return
        if self._num_young == self._half:
            self._young, self._old = SuffixAutomaton(), self._young
            self._num_young = 0
        self._young.separate()
        self._young.extend(tokens)
        self._num_young += 1

    def continuations(
        self, tail: Sequence[int], limit: int, factor: float, least: float
    ) -> list[Continuation]:
        found = []
        for automaton in (self._young, self._old):
            if automaton.num_tokens:
                state, match = automaton.find(tail)
                found.append(automaton.continuation(state, match, limit, factor, least))
        return found


class SuffixDrafter:
    """Of the request's own text and earlier outputs, the one that promises more tokens drafts."""

    needs = FeatureRequest()

    def __init__(self, options: Options) -> None:
        self._options = options
        self._texts: dict[str, _Text] = {}
        self._earlier = EarlierOutputs(options.suffix_decoding_max_cached_requests)

    def propose(self, context: DraftContext) -> list[Draft]:
        drafts = []
        for request in context.requests:
            state = request.state
            if not request.max_drafts:
                drafts.append(Draft(()))
                continue
            text = self._texts.setdefault(request.request_id, _Text())
            text.automaton.extend(state.token_ids[text.automaton.num_tokens :])
            text.tokens, text.num_prompt_tokens = state.token_ids, state.num_prompt_tokens
            drafts.append(Draft(self._best(text, request.max_drafts).tokens))
        return drafts

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            text = self._texts.pop(request_id, None)
            if text is not None:
                self._earlier.add(text.tokens[text.num_prompt_tokens :])

    def _best(self, text: _Text, limit: int) -> Continuation:
        options = self._options
        factor = options.suffix_decoding_max_spec_factor
        least = options.suffix_decoding_min_token_prob
        own = text.automaton.continuation(*text.automaton.repeated(), limit, factor, least)
        tail = text.tokens[-options.suffix_decoding_max_tree_depth :]
        found = [own, *self._earlier.continuations(tail, limit, factor, least)]
        return max(found, key=lambda each: each.expected, default=_NOTHING)


def create(options: Options, target: Model, ops: Ops, acceptance: str) -> SuffixDrafter:
    """``target``, ``ops`` and ``acceptance`` are unused: tokens alone decide this draft."""
    return SuffixDrafter(options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
