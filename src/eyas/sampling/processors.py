"""From raw logits to the candidates for the next token, in the order of docs/exactness.md.

Masks, bias and penalties; temperature; min-p; top-k; top-p. The meaning of each parameter is
vLLM's, except that ties are decided here: where a rule has to choose between tokens of equal
probability, the lower id wins. Everything is float64 arithmetic on one row alone.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas import _core
from eyas.sampling.history import Ids, Prefix
from eyas.sampling.rules import SamplingRules

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

_TOP_P_TRIES = (256, 2048, 8192)  # how many are sorted before all are; the bits are the same
_TOP_P_NEAR = -18.0  # log-weight below which tokens are left out where they cannot matter
_TOP_P_ROUNDING = 1e-9  # far above the rounding error of a sum over any vocabulary


class LogitsError(Exception):
    """One request's logits give no next token: they hold NaN or infinity, or masks leave no token.

    The request fails; others are not concerned.
    """


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that survived, by ascending id, and log(probability) up to a common constant.

    The best candidate's ``log_weights`` entry is 0.
    """

    ids: Ids
    log_weights: Floats


class LogitRules:
    """The masks, bias and penalties of a request, as arrays."""

    def __init__(self, rules: SamplingRules) -> None:
        self._rules = rules
        allowed = rules.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, np.int64)
        self._stop_ids = np.array(rules.stop_ids, np.int64)
        self._bias_ids = np.array([token for token, _ in rules.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in rules.logit_bias], np.float64)
        self.tail_length = max((len(word) - 1 for word in rules.bad_words), default=0)
        self.counts_seen = rules.repetition_penalty != 1
        self.counts_output = rules.presence_penalty != 0 or rules.frequency_penalty != 0
        self._none_but_min_tokens = not (
            allowed is not None
            or rules.bad_words
            or rules.logit_bias
            or self.counts_seen
            or self.counts_output
        )

    def changes_nothing(self, num_output: int) -> bool:
        """Whether ``apply`` would return the logits as they are."""
        stop_masked = num_output < self._rules.min_tokens and len(self._stop_ids) > 0
        return self._none_but_min_tokens and not stop_masked

    def apply(self, logits_V: Logits, prefix: Prefix) -> Floats:
        """Scores [V]: logits after masks (-inf), bias and penalties.

        Raises LogitsError if nothing survives the masks.
        """
        rules = self._rules
        scores_V = logits_V.astype(np.float64)
        if self._allowed is not None:
            forbidden = np.ones(len(scores_V), np.bool_)
            forbidden[self._allowed] = False
            scores_V[forbidden] = -np.inf
        for word in rules.bad_words:
            start = len(word) - 1
            if start <= len(prefix.tail) and prefix.tail[len(prefix.tail) - start :] == word[:-1]:
                scores_V[word[-1]] = -np.inf
        if prefix.num_output < rules.min_tokens:
            scores_V[self._stop_ids] = -np.inf
        scores_V[self._bias_ids] += self._biases
        if self.counts_seen:
            seen = scores_V[prefix.seen]
            penalty = rules.repetition_penalty
            with np.errstate(over="ignore"):  # checked below
                scores_V[prefix.seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self.counts_output:
            scores_V[prefix.output_ids] -= (
                rules.frequency_penalty * prefix.output_counts + rules.presence_penalty
            )
        best = scores_V.max()
        if best == -np.inf:
            raise LogitsError(
                "no token is left: allowed_token_ids, bad_words and min_tokens exclude all of them"
            )
        if best == np.inf:
            raise LogitsError(
                f"logits are not finite after repetition_penalty={rules.repetition_penalty}"
            )
        return scores_V


def check_logits(logits_V: Logits) -> None:
    """Raises LogitsError if a logit is NaN or infinite."""
    finite = np.isfinite(logits_V)
    if not finite.all():
        first = int(np.argmin(finite))
        raise LogitsError(
            f"logits are not finite: {logits_V[first]} at token {first}, "
            f"{len(finite) - int(finite.sum())} of {len(finite)} in all"
        )


def candidates(scores_V: Floats, rules: SamplingRules) -> Candidates:
    """Temperature, min-p, top-k and top-p. ``rules.temperature`` must be above 0.

    Scores are shifted so that the best is 0 before they are divided by the temperature: no
    temperature above 0 is too low for that, so none is clamped.
    """
    weights_V = scores_V - scores_V.max()
    with np.errstate(over="ignore"):  # to -inf: a probability below exp(-1e308)
        weights_V /= rules.temperature
    # p >= min_p * p_max, in logs and relative to p_max
    floor = math.log(rules.min_p) if rules.min_p > 0 else np.finfo(np.float64).min
    ids: Ids | None = None  # all
    log_weights = weights_V
    if 0 < rules.top_k < len(weights_V):
        # Both keep the best, so their order makes no difference, and this one is cheaper.
        ids = top_k_indices(weights_V, rules.top_k)
        log_weights = weights_V[ids]
        kept = log_weights >= floor
        ids, log_weights = ids[kept], log_weights[kept]
    elif weights_V.min() < floor:
        ids = np.flatnonzero(weights_V >= floor)
        log_weights = weights_V[ids]
    if rules.top_p < 1:
        head = _top_p_indices(log_weights, rules.top_p)
        ids = head if ids is None else ids[head]
        log_weights = log_weights[head]
    if ids is None:
        ids = np.arange(len(weights_V))
    return Candidates(ids, log_weights)


def top_k_indices(values: npt.NDArray[np.floating], k: int) -> Ids:
    """Ascending indices of the k greatest values; among equals the lower index is greater."""
    assert values.dtype in (np.float32, np.float64), values.dtype
    top = np.empty(min(k, len(values)), np.int64)
    select = _core.top_k_f32 if values.dtype == np.float32 else _core.top_k_f64
    values = np.ascontiguousarray(values)
    select(values.ctypes.data, len(values), len(top), top.ctypes.data)
    return top


def sort_descending(values: npt.NDArray[np.floating]) -> Ids:
    """Indices from the greatest to the least value; among equals the lower index comes first."""
    return np.argsort(-values, kind="stable")


def _top_p_indices(log_weights: Floats, top_p: float) -> Ids:
    """Ascending indices of the smallest set of most probable tokens that reaches ``top_p``."""
    # What the improbable tokens can add to the total is bounded without looking at them. Unless the
    # choice lies within that bound and rounding, the others decide, with a small part of the work.
    near = np.flatnonzero(log_weights >= _TOP_P_NEAR)
    near_log_weights = log_weights[near]
    near_weights = np.exp(near_log_weights)
    total = float(near_weights.sum())
    most = total + (len(log_weights) - len(near)) * math.exp(_TOP_P_NEAR)
    low, high = top_p * total * (1 - _TOP_P_ROUNDING), top_p * most * (1 + _TOP_P_ROUNDING)
    head = _shortest_head(near_log_weights, near_weights, low, high)
    if head is not None:
        return near[head]
    weights = np.exp(log_weights)
    target = top_p * float(weights.sum())
    head = _shortest_head(log_weights, weights, target, target)
    # The sum in this order may be a rounding error short of a target that is all of it.
    return np.arange(len(weights)) if head is None else head


def _shortest_head(log_weights: Floats, weights: Floats, low: float, high: float) -> Ids | None:
    """Ascending indices of the fewest most probable tokens whose weights add up to a target, which
    is between ``low`` and ``high``: None if these two differ in that, or all tokens are too few."""
    # Sorting the whole row is the expensive part and rarely needed. The running sum goes from the
    # most probable token down, so it has the same bits however many are sorted.
    for size in (*_TOP_P_TRIES, len(weights)):
        head = top_k_indices(log_weights, size)
        head = head[sort_descending(log_weights[head])]
        first, last = np.searchsorted(np.cumsum(weights[head]), (low, high))
        if last < len(head):
            return np.sort(head[: first + 1]) if first == last else None
    return None
