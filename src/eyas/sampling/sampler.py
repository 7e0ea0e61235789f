"""One token from one row of logits: a pure function of the row, the rules, the seed and the prefix.

The noise is drawn per token (the Gumbel-max trick), so a drafter that samples with the same state
proposes the target's own token whenever the two distributions are close: see docs/exactness.md, and
Daliri, Musco and Suresh, "Coupling without Communication" (2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from eyas import _core
from eyas.sampling.gumbel_max import gumbel_max
from eyas.sampling.history import Ids, Prefix, TokenCounts
from eyas.sampling.noise import Domain, Floats, uniform
from eyas.sampling.processors import LogitRules, Logits, candidates, check_logits
from eyas.sampling.rules import SamplingRules

_NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class SampleState:
    """One sample sequence: ``token_ids`` is the prompt, then the accepted output tokens.

    Grow it with ``append`` only, which keeps the token counts of the penalties in step.
    """

    rules: SamplingRules
    seed: int
    sample_index: int
    num_prompt_tokens: int
    token_ids: list[int]
    logit_rules: LogitRules = field(init=False, repr=False, compare=False)
    _seen: TokenCounts = field(init=False, repr=False, compare=False)
    _output: TokenCounts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.num_prompt_tokens <= len(self.token_ids)
        self.logit_rules = LogitRules(self.rules)
        self._seen = TokenCounts(self.token_ids if self.logit_rules.counts_seen else ())
        output = self.token_ids[self.num_prompt_tokens :]
        self._output = TokenCounts(output if self.logit_rules.counts_output else ())

    def append(self, tokens: Sequence[int]) -> None:
        """Add accepted output tokens."""
        self.token_ids.extend(tokens)
        if self.logit_rules.counts_seen:
            self._seen.extend(tokens)
        if self.logit_rules.counts_output:
            self._output.extend(tokens)

    def position(self, num_extra: int = 0) -> int:
        """Output position (0 is the first output token) of the token that comes next, after
        ``num_extra`` drafts."""
        return len(self.token_ids) - self.num_prompt_tokens + num_extra

    def prefix(self, extra: Sequence[int]) -> Prefix:
        """The prefix ``token_ids + extra``; the state does not change."""
        num_output = self.position(len(extra))
        need = min(self.logit_rules.tail_length, num_output)
        known = max(need - len(extra), 0)
        tail = (*self.token_ids[len(self.token_ids) - known :], *extra[len(extra) - need + known :])
        seen, output_ids, output_counts = _NO_IDS, _NO_IDS, _NO_IDS
        if self.logit_rules.counts_seen:
            seen, _ = self._seen.with_extra(extra)
        if self.logit_rules.counts_output:
            output_ids, output_counts = self._output.with_extra(extra)
        return Prefix(num_output, tail, seen, output_ids, output_counts)


def sample(logits_V: Logits, state: SampleState, extra: Sequence[int] = ()) -> int:
    """The token after ``state.token_ids + extra``, given its float32 logits [V].

    Raises LogitsError for logits that aren't finite, or if masks leave no token.
    """
    greedy = state.rules.temperature == 0
    if greedy and state.logit_rules.changes_nothing(state.position(len(extra))):
        token = _core.best_index(logits_V)
        if token < 0:
            check_logits(logits_V)
        return token
    scores_V = _scores(logits_V, state, extra)
    if greedy:
        return int(scores_V.argmax())
    left = candidates(scores_V.astype(np.float64, copy=False), state.rules)
    position = state.position(len(extra))
    return gumbel_max(left, len(scores_V), state.seed, state.sample_index, position)


def distribution(logits_V: Logits, state: SampleState, extra: Sequence[int] = ()) -> torch.Tensor:
    """Probabilities [V] (float64) of the token after ``state.token_ids + extra``: what ``sample``
    draws from. Temperature 0 is one-hot. Raises as ``sample`` does."""
    scores_V = _scores(logits_V, state, extra)
    probs_V = np.zeros(len(scores_V))
    if state.rules.temperature == 0:
        probs_V[scores_V.argmax()] = 1
        return torch.from_numpy(probs_V)
    left = candidates(scores_V.astype(np.float64, copy=False), state.rules)
    weights = np.exp(left.log_weights)
    probs_V[left.ids] = weights / weights.sum()
    return torch.from_numpy(probs_V)


def draw_draft(probs_V: torch.Tensor, state: SampleState, position: int) -> int:
    """A proposal for output ``position`` (``state.position(drafts so far)``), drawn from the
    draft's distribution, for rejection mode.

    Rejection sampling gives the target's distribution only if a proposal, once drawn, is verified
    whatever it is: decide how many tokens to draft before looking at them.
    """
    draw = uniform(state.seed, state.sample_index, position, Domain.DRAFT)
    return draw_from(probs_V.numpy(), draw)


def draw_from(weights_V: Floats, draw: float) -> int:
    """The token at quantile ``draw`` (between 0 and 1) of the given weights, which need not sum to
    1; never one of weight 0."""
    cumulative_V = np.cumsum(weights_V)
    token = int(np.searchsorted(cumulative_V, draw * cumulative_V[-1], side="right"))
    # Rounding can put the quantile on the total itself, past the last token that has any weight.
    return token if token < len(weights_V) else int(np.flatnonzero(weights_V)[-1])


def as_row(logits_V: Logits) -> Logits:
    """The row as a contiguous float32 array, checked to be finite (LogitsError)."""
    row: Logits = np.ascontiguousarray(logits_V)
    assert row.dtype == np.float32, row.dtype
    assert row.ndim == 1, row.shape
    check_logits(row)
    return row


def _scores(logits_V: Logits, state: SampleState, extra: Sequence[int]) -> Logits | Floats:
    row = as_row(logits_V)
    if state.logit_rules.changes_nothing(state.position(len(extra))):
        return row
    return state.logit_rules.apply(row, state.prefix(extra))
