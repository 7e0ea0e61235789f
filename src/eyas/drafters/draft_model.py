"""A smaller model of the same vocabulary drafts (Leviathan et al. 2023; Chen et al. 2023)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.drafters.base import Draft, DraftContext, DraftRequest, FeatureRequest
from eyas.loading.checkpoint import open_checkpoint
from eyas.models.base import Model
from eyas.models.batch import Segment, build_batch
from eyas.models.registry import load_model
from eyas.ops.base import Array, Ops
from eyas.sampling.processors import LogitsError
from eyas.sampling.sampler import distribution, draw_draft, sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """``model``: the draft's checkpoint (a path, a Hub id, or ``demo``)."""

    model: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError(
                "speculative_config with method 'draft_model' needs 'model': the draft's "
                "path, Hub id, or 'demo'"
            )


class ModelDrafter:
    """Autoregressive drafting with the target's sampling rules and, in "exact" mode, its noise:
    where the draft's distribution equals the target's, so does its token."""

    def __init__(self, model: Model, ops: Ops, acceptance: str) -> None:
        self.needs = FeatureRequest(model.groups)
        self._model = model
        self._ops = ops
        self._keep_probs = acceptance == "rejection"

    def propose(self, context: DraftContext) -> list[Draft]:
        """One catch-up pass over accepted tokens that the draft has not seen, then one token per
        request and pass."""
        chains = [_Chain(request) for request in context.requests]
        active = [chain for chain in chains if chain.start < chain.request.known]
        segments = [
            Segment(
                chain.request.state.token_ids[chain.start : chain.request.known],
                chain.start,
                chain.request.tables,
            )
            for chain in active
        ]
        while active:
            hidden_RH = self._forward(segments, context)
            logits_RV = None
            if any(chain.wants_more for chain in active):
                logits_RV = self._model.logits(hidden_RH)
            for i, chain in enumerate(active):
                if chain.wants_more:
                    assert logits_RV is not None
                    self._extend(chain, logits_RV[i])
            active = [chain for chain in active if chain.wants_more]
            segments = [
                Segment(chain.tokens[-1:], chain.next_position, chain.request.tables)
                for chain in active
            ]
        return [chain.draft() for chain in chains]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept per request: KV lengths are the runner's."""

    def _forward(self, segments: Sequence[Segment], context: DraftContext) -> Array:
        """The last hidden state [R, H] of each segment."""
        batch = build_batch(segments, self._model.groups, self._ops, context.block_size)
        hidden_TH = self._model.forward(batch, context.kv)
        lengths = [len(segment.token_ids) for segment in segments]
        last_RH: Array = hidden_TH[np.cumsum(lengths) - 1]
        return last_RH

    def _extend(self, chain: "_Chain", logits_V: Array) -> None:
        state = chain.request.state
        try:
            if not self._keep_probs:
                chain.tokens.append(sample(logits_V, state, chain.tokens))
                return
            probs_V = distribution(logits_V, state, chain.tokens)
        except LogitsError as error:
            # The target's own answer does not depend on the draft, so only the draft ends here.
            logger.warning("the draft model stopped a draft: %s", error)
            chain.ended = True
            return
        position = state.position(len(chain.tokens))
        chain.tokens.append(draw_draft(probs_V, state, position))
        chain.probs.append(probs_V)


class _Chain:
    """A draft in the making."""

    def __init__(self, request: DraftRequest) -> None:
        self.request = request
        self.start = request.kv_length
        if request.max_drafts:
            # The newest token's logits are needed even if its KV is there already.
            self.start = min(self.start, request.known - 1)
        self.tokens: list[int] = []
        self.probs: list[torch.Tensor] = []
        self.ended = False

    @property
    def wants_more(self) -> bool:
        return not self.ended and len(self.tokens) < self.request.max_drafts

    @property
    def next_position(self) -> int:
        return self.request.known + len(self.tokens) - 1

    def draft(self) -> Draft:
        probs_KV = torch.stack(self.probs) if self.probs else None
        return Draft(tuple(self.tokens), self.request.known, probs_KV)


def create(options: Options, target: Model, ops: Ops, acceptance: str) -> ModelDrafter:
    """Load the draft. ValueError if its vocabulary is not the target's."""
    checkpoint = open_checkpoint(options.model)
    model = load_model(checkpoint.config, checkpoint.weights, ops, "draft")
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft's vocabulary has {model.vocab_size} tokens and the target's "
            f"{target.vocab_size}: use a draft with the target's vocabulary"
        )
    return ModelDrafter(model, ops, acceptance)
