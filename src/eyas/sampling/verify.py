"""Which drafts stand, and the token after them: the two acceptance rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.sampling.noise import Domain, Floats, uniform
from eyas.sampling.processors import Logits, LogitsError
from eyas.sampling.sampler import SampleState, distribution, draw_from, sample


@dataclass(frozen=True, slots=True)
class Verified:
    """``tokens``: the accepted drafts, then one more: the bonus token if all were accepted, else
    the correction of the first rejected one. ``num_accepted`` is ``len(tokens) - 1``."""

    tokens: tuple[int, ...]
    num_accepted: int


def verify_exact(logits_RV: Logits, state: SampleState, drafts: Sequence[int]) -> Verified:
    """Accept drafts as long as each equals the token that plain decoding samples there.

    Row j of ``logits_RV`` [len(drafts) + 1, V] follows ``state.token_ids + drafts[:j]``. Rows after
    the first difference are not looked at. The result is what calling ``sample`` token by token
    gives, whatever the drafts.

    Raises as ``sample`` does for the first row. Where a later row gives no token, what came before
    it stands, and the next step meets the same row first: an error, too, comes where plain decoding
    has it.
    """
    assert len(logits_RV) == len(drafts) + 1, (logits_RV.shape, len(drafts))
    tokens: list[int] = []
    for row in range(len(drafts) + 1):
        try:
            tokens.append(sample(logits_RV[row], state, drafts[:row]))
        except LogitsError:
            if not tokens:
                raise
            return Verified(tuple(tokens), row - 1)
        if row < len(drafts) and tokens[-1] != drafts[row]:
            return Verified(tuple(tokens), row)
    return Verified(tuple(tokens), len(drafts))


def verify_rejection(
    logits_RV: Logits,
    state: SampleState,
    drafts: Sequence[int],
    draft_probs_KV: torch.Tensor | None,
) -> Verified:
    """Speculative sampling: accept a draft with probability min(1, target / draft), and replace the
    first rejected one by a draw from the residual norm(max(0, target - draft)).

    ``logits_RV`` is as in ``verify_exact``. ``draft_probs_KV`` holds the distributions that the
    drafts were drawn from (``distribution`` of the draft's logits); None means that each was
    proposed with certainty. The tokens are distributed as the target's, but which ones come out
    depends on the drafts. Reproducible: every number is a function of seed, sample and position.
    Raises as ``sample`` does.

    Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative
    Decoding" (2023), algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with
    Speculative Sampling" (2023).
    """
    assert len(logits_RV) == len(drafts) + 1, (logits_RV.shape, len(drafts))
    for row, token in enumerate(drafts):
        position = state.position(row)
        target_V = distribution(logits_RV[row], state, drafts[:row]).numpy()
        draft_V = _draft_distribution(draft_probs_KV, row, token, len(target_V))
        assert draft_V[token] > 0, f"draft token {token} was proposed with probability 0"
        accept = uniform(state.seed, state.sample_index, position, Domain.ACCEPT)
        if accept >= accept_probability(target_V[token], draft_V[token]):
            draw = uniform(state.seed, state.sample_index, position, Domain.TARGET)
            correction = draw_from(residual(target_V, draft_V), draw)
            return Verified((*drafts[:row], correction), row)
    target_V = distribution(logits_RV[-1], state, drafts).numpy()
    draw = uniform(state.seed, state.sample_index, state.position(len(drafts)), Domain.TARGET)
    return Verified((*drafts, draw_from(target_V, draw)), len(drafts))


def accept_probability(target: Floats, draft: Floats) -> Floats:
    """min(1, target / draft), element by element; ``draft`` must not be 0."""
    return np.minimum(target, draft) / draft


def residual(target_V: Floats, draft_V: Floats) -> Floats:
    """norm(max(0, target - draft)): what the target has over the draft [V]."""
    excess_V = np.maximum(target_V - draft_V, 0.0)
    total = float(excess_V.sum())
    # No excess anywhere: the two are equal but for rounding, and so is any draw from the target.
    return excess_V / total if total > 0 else target_V


def _draft_distribution(
    draft_probs_KV: torch.Tensor | None, row: int, token: int, vocab_size: int
) -> Floats:
    if draft_probs_KV is not None:
        probs_V: Floats = draft_probs_KV[row].numpy()
        return probs_V
    point_mass_V = np.zeros(vocab_size)
    point_mass_V[token] = 1
    return point_mass_V
