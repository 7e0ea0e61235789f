"""Collectors: they gather verdicts until somebody wants a RequestOutput of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eyas.engine.inputs import CheckedPrompt
from eyas.engine.output import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from eyas.engine.request import Request
from eyas.engine.scheduler import FinishDecision
from eyas.engine.stopping import OutputText
from eyas.types import RequestWork, TokenLogprobs, Verdict

OutputKind = Literal["cumulative", "final_only"]


def as_dict(logprobs: TokenLogprobs, token_text: Callable[[int], str] | None) -> dict[int, Logprob]:
    """One position's log-probabilities by token id, in the order of ``logprobs``."""
    return {
        token_id: Logprob(logprob, rank, None if token_text is None else token_text(token_id))
        for token_id, logprob, rank in zip(
            logprobs.token_ids, logprobs.logprobs, logprobs.ranks, strict=True
        )
    }


class SampleCollector:
    """One sample's output. Its tokens are the request's own; it adds what the scheduler has no use
    for. ``new_text`` makes an empty OutputText; ``token_text`` None decodes no logprobs."""

    def __init__(
        self,
        request: Request,
        new_text: Callable[[], OutputText],
        token_text: Callable[[int], str] | None,
    ) -> None:
        self.request = request
        self._new_text = new_text
        self._token_text = token_text
        self._text = new_text()
        self._logprobs: list[dict[int, Logprob]] = []
        self._logprob_sums: list[float] = [0.0]  # of the first 0, 1, ... tokens
        self._draft_positions: list[int | None] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: str | None = None

    def decide(self, verdict: Verdict) -> FinishDecision | None:
        """Takes a verdict's tokens one by one until a stop rule ends the output.

        The scheduler appends the tokens to the request afterwards; see ``rewind`` if it doesn't.
        """
        for i, token_id in enumerate(verdict.tokens):
            finish = self._text.push(token_id)
            self._draft_positions.append(i if i < verdict.num_accepted else None)
            if self.request.rules.logprobs is not None:
                entry = as_dict(verdict.logprobs[i], self._token_text)
                self._logprobs.append(entry)
                self._logprob_sums.append(self._logprob_sums[-1] + entry[token_id].logprob)
            if finish is not None:
                self._finish_reason, self._stop_reason = finish.reason, finish.stop_reason
                return FinishDecision(i + 1, finish.reason)
        return None

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends the output where it is, for a reason that is not in its tokens."""
        self._text.close()
        self._finish_reason, self._error = reason, error

    def rewind(self) -> None:
        """Forgets tokens that were decided on but never reached the request: the step failed."""
        committed = self.request.output_token_ids
        if self._text.num_tokens == len(committed):
            return
        del self._logprobs[len(committed) :]
        del self._logprob_sums[len(committed) + 1 :]
        del self._draft_positions[len(committed) :]
        self._finish_reason = self._stop_reason = None
        self._text = self._new_text()
        for token_id in committed:
            self._text.push(token_id)

    def build(self) -> CompletionOutput:
        token_ids = list(self.request.output_token_ids)
        wants_logprobs = self.request.rules.logprobs is not None
        return CompletionOutput(
            index=self.request.sample_index,
            text=self._text.text,
            token_ids=token_ids,
            cumulative_logprob=self._logprob_sums[-1] if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            seed=self.request.seed,
            draft_positions=list(self._draft_positions),
            error=self._error,
        )


@dataclass(slots=True)
class RequestCollector:
    """One user's request: ``samples`` by sample index, and how many of them run."""

    request_id: str
    prompt: CheckedPrompt
    samples: Sequence[SampleCollector]
    kind: OutputKind
    token_text: Callable[[int], str] | None
    arrival_time: float

    num_unfinished: int = field(init=False)
    first_token_time: float | None = None
    finished_time: float | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.samples)

    def add(self, work: RequestWork, verdict: Verdict, now: float) -> None:
        """Takes what a verdict says about the request, other than its tokens."""
        if work.drafts and verdict.error is None:
            self.num_drafts += 1
            self.num_draft_tokens += len(work.drafts)
            self.num_accepted_tokens += verdict.num_accepted
        if verdict.tokens and self.first_token_time is None:
            self.first_token_time = now
        # A preempted request computes its prompt again and reports what is already here.
        for position, logprobs in enumerate(verdict.prompt_logprobs, start=work.start + 1):
            if position == len(self.prompt_logprobs):
                self.prompt_logprobs.append(as_dict(logprobs, self.token_text))
            assert position < len(self.prompt_logprobs), f"no prompt logprobs before {position}"

    def finish_one(self, now: float) -> None:
        """Takes note that one more sample has finished."""
        self.num_unfinished -= 1
        if self.num_unfinished == 0:
            self.finished_time = now

    def build(self) -> RequestOutput:
        requests = [sample.request for sample in self.samples]
        wants_prompt_logprobs = requests[0].rules.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            prompt_logprobs=list(self.prompt_logprobs) if wants_prompt_logprobs else None,
            outputs=[sample.build() for sample in self.samples],
            finished=self.num_unfinished == 0,
            num_cached_tokens=requests[0].num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                num_drafts=self.num_drafts,
                num_draft_tokens=self.num_draft_tokens,
                num_accepted_tokens=self.num_accepted_tokens,
                num_preemptions=sum(request.num_preemptions for request in requests),
            ),
        )
