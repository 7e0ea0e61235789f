"""One step on one worker: forward -> verify -> propose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from eyas.drafters.base import Draft, DraftContext, Drafter, DraftRequest
from eyas.kv_spec import KVGroupSpec
from eyas.models.base import Model
from eyas.models.batch import Segment, build_batch
from eyas.ops.base import Array, KVCache, Ops
from eyas.runner.kv_cache import allocate_kv
from eyas.sampling.logprobs import token_logprobs
from eyas.sampling.processors import LogitsError
from eyas.sampling.sampler import SampleState
from eyas.sampling.verify import Verified, verify_exact, verify_rejection
from eyas.types import RequestWork, StepPlan, StepResult, TokenLogprobs, Verdict

Acceptance = Literal["exact", "rejection"]


@dataclass(slots=True)
class _Running:
    """What the runner keeps of a request between steps."""

    state: SampleState
    speculate: bool
    draft_kv_length: int
    draft_probs_KV: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One work item after verification, before drafting."""

    verified: Verified
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    error: str | None = None


_NOTHING = Verified((), 0)


class ModelRunner:
    """Runs the target, verifies drafts and asks the drafter for the next ones.

    Holds each known request's accepted tokens, so that a plan carries only what is new.
    Groups, and every block table, are the target's first and the drafter's after them.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None,
        ops: Ops,
        acceptance: Acceptance,
        kv_dtype: torch.dtype,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.ops = ops
        self.acceptance = acceptance
        self.kv_dtype = kv_dtype
        draft_groups = drafter.needs.kv_groups if drafter else ()
        self.groups: tuple[KVGroupSpec, ...] = tuple(
            group.kv for group in (*target.groups, *draft_groups)
        )
        self.block_size = 0
        self.kv: list[KVCache] = []
        self._requests: dict[str, _Running] = {}

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        assert not self.kv, "KV is allocated once"
        self.block_size = block_size
        self.kv = allocate_kv(self.groups, num_blocks, block_size, self.ops, self.kv_dtype)

    def execute(self, plan: StepPlan) -> StepResult:
        self._update_requests(plan)
        if not plan.work:
            return StepResult(())
        hidden_TH = self._forward(plan.work)
        outcomes = self._verify(plan.work, hidden_TH)
        drafts = self._propose(plan.work, outcomes)
        return StepResult(
            tuple(map(self._verdict, plan.work, outcomes, drafts)),
        )

    def _update_requests(self, plan: StepPlan) -> None:
        self._forget([name for name in plan.dropped if name in self._requests])
        starts = {work.request_id: work.start for work in plan.work}
        for new in plan.new:
            state = SampleState(
                new.rules,
                new.seed,
                new.sample_index,
                new.num_prompt_tokens,
                list(new.token_ids),
            )
            # What the prefix cache served, it served in the draft's groups too.
            self._requests[new.request_id] = _Running(
                state, new.speculate, draft_kv_length=starts[new.request_id]
            )

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._requests[request_id]
        if self.drafter:
            self.drafter.forget(request_ids)

    def _forward(self, works: Sequence[RequestWork]) -> Array:
        count = len(self.target.groups)
        segments = []
        for work in works:
            known = self._requests[work.request_id].state.token_ids
            end = work.start + work.num_tokens - len(work.drafts)
            tokens = [*known[work.start : end], *work.drafts]
            assert len(tokens) == work.num_tokens, (work.request_id, len(tokens), work.num_tokens)
            segments.append(Segment(tokens, work.start, work.tables[:count]))
        batch = build_batch(segments, self.target.groups, self.ops, self.block_size)
        return self.target.forward(batch, self.kv[:count])

    def _verify(self, works: Sequence[RequestWork], hidden_TH: Array) -> list[_Outcome]:
        """Compute logits only of the rows that somebody reads, and decide each request alone."""
        rows: list[int] = []
        spans: list[tuple[int, int, int]] = []  # per request: first logits row, prompt rows, rows
        first_row = 0
        for work in works:
            state = self._requests[work.request_id].state
            prompt_rows = _prompt_rows(work, state)
            sample_rows = 1 + len(work.drafts) if _samples(work, state) else 0
            last = first_row + work.num_tokens
            spans.append((len(rows), prompt_rows, prompt_rows + sample_rows))
            rows.extend(range(first_row, first_row + prompt_rows))
            rows.extend(range(last - sample_rows, last))
            first_row = last
        read = hidden_TH if len(rows) == len(hidden_TH) else hidden_TH[rows]
        logits_RV = self.target.logits(read) if rows else read
        return [
            self._decide(work, logits_RV[start : start + count], prompt_rows)
            for work, (start, prompt_rows, count) in zip(works, spans, strict=True)
        ]

    def _decide(self, work: RequestWork, logits_RV: Array, prompt_rows: int) -> _Outcome:
        running = self._requests[work.request_id]
        state, rules = running.state, running.state.rules
        try:
            prompt_logprobs = tuple(
                token_logprobs(
                    logits_RV[i], state.token_ids[work.start + i + 1], rules.prompt_logprobs or 0
                )
                for i in range(prompt_rows)
            )
            sampled_RV = logits_RV[prompt_rows:]
            if not len(sampled_RV):
                return _Outcome(_NOTHING, (), prompt_logprobs)
            if self.acceptance == "exact":
                verified = verify_exact(sampled_RV, state, work.drafts)
            else:
                probs_KV = running.draft_probs_KV
                verified = verify_rejection(
                    sampled_RV,
                    state,
                    work.drafts,
                    None if probs_KV is None else probs_KV[: len(work.drafts)],
                )
            logprobs: tuple[TokenLogprobs, ...] = ()
            if rules.logprobs is not None:
                logprobs = tuple(
                    token_logprobs(row, token, rules.logprobs)
                    for row, token in zip(sampled_RV, verified.tokens, strict=False)
                )
        except LogitsError as error:
            return _Outcome(_NOTHING, (), (), str(error))
        state.append(verified.tokens)
        return _Outcome(verified, logprobs, prompt_logprobs)

    def _propose(self, works: Sequence[RequestWork], outcomes: Sequence[_Outcome]) -> list[Draft]:
        """Let the drafter see what was accepted; one Draft per work item, empty where unasked."""
        drafts = [Draft(())] * len(works)
        if self.drafter is None:
            return drafts
        indices = [
            i
            for i, (work, outcome) in enumerate(zip(works, outcomes, strict=True))
            if self._requests[work.request_id].speculate and outcome.error is None
        ]
        count = len(self.target.groups)
        requests = tuple(self._draft_request(works[i], outcomes[i], count) for i in indices)
        if not requests:
            return drafts
        context = DraftContext(requests, self.kv[count:], self.block_size)
        for i, request, draft in zip(indices, requests, self.drafter.propose(context), strict=True):
            assert len(draft.tokens) <= request.max_drafts
            running = self._requests[request.request_id]
            running.draft_kv_length = draft.kv_length
            running.draft_probs_KV = draft.probs_KV
            drafts[i] = draft
        return drafts

    def _draft_request(self, work: RequestWork, outcome: _Outcome, count: int) -> DraftRequest:
        running = self._requests[work.request_id]
        total = len(running.state.token_ids)
        if not outcome.verified.tokens:  # a prefill chunk that does not end the prompt
            known = work.start + work.num_tokens
        else:
            known = total if work.max_drafts else total - 1
        return DraftRequest(
            work.request_id,
            running.state,
            known,
            # Rejected tokens leave the draft's length too.
            min(running.draft_kv_length, known),
            work.max_drafts,
            work.tables[count:],
        )

    def _verdict(self, work: RequestWork, outcome: _Outcome, draft: Draft) -> Verdict:
        return Verdict(
            request_id=work.request_id,
            tokens=outcome.verified.tokens,
            num_accepted=outcome.verified.num_accepted,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            next_drafts=draft.tokens,
            draft_kv_length=draft.kv_length,
            error=outcome.error,
        )


def _samples(work: RequestWork, state: SampleState) -> bool:
    return work.start + work.num_tokens - len(work.drafts) == len(state.token_ids)


def _prompt_rows(work: RequestWork, state: SampleState) -> int:
    """How many leading rows of this work predict a prompt token whose log-probability is asked."""
    if state.rules.prompt_logprobs is None:
        return 0
    last_predicting = state.num_prompt_tokens - 1
    return max(0, min(work.start + work.num_tokens, last_predicting) - work.start)
