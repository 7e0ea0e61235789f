"""Scheduler: who runs in the next step, how many tokens, which drafts.

Continuous batching: every step has one budget of tokens, shared by prefill chunks, decodes and
verify spans. Requests run in order of arrival; when KV blocks run out, the latest-arrived running
one is preempted and later recomputed. ``running`` followed by ``waiting`` is always in order of
arrival, so the oldest request always progresses, and every request finishes.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from eyas.engine.kv_manager import KVManager
from eyas.engine.request import Request, RequestStatus
from eyas.types import NewRequest, RequestWork, StepPlan, StepResult, Verdict


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of a step (``max_num_seqs`` requests, ``max_num_batched_tokens`` tokens) and of a
    request (``max_model_len`` tokens, prompt and output together)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token per step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than "
                f"max_model_len ({self.max_model_len}): raise it, or set "
                f"enable_chunked_prefill=True"
            )


@dataclass(frozen=True, slots=True)
class FinishDecision:
    """A stop rule's decision: keep the first ``num_tokens`` of the verdict's tokens and finish."""

    num_tokens: int
    reason: str


class Scheduler:
    """One step is ``schedule()``, then ``commit(plan, result, decide)`` or, when the executor
    raised, ``fail_step(plan)``. ``add`` is welcome at any time, ``abort`` between steps."""

    def __init__(self, options: SchedulerOptions, kv: KVManager) -> None:
        self.options = options
        self.kv = kv
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._known_to_runner: set[str] = set()
        self._dropped: list[str] = []
        self._in_flight: StepPlan | None = None

    @property
    def requests(self) -> Collection[Request]:
        """All requests that have not finished."""
        return self._requests.values()

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queues a new request. Raises ValueError if it could never run to its end."""
        name, num_prompt = request.request_id, len(request.prompt_token_ids)
        max_model_len = self.options.max_model_len
        if name in self._requests:
            raise ValueError(f"request {name!r} is already running: use another request_id")
        if num_prompt == 0:
            raise ValueError(f"request {name!r} has an empty prompt: at least one token is needed")
        if num_prompt >= max_model_len:
            raise ValueError(
                f"request {name!r} has {num_prompt} prompt tokens, but max_model_len "
                f"{max_model_len} leaves room for {max_model_len - 1}: shorten the prompt"
            )
        assert num_prompt < request.max_length <= max_model_len, (
            f"{name}: max_length {request.max_length} of {num_prompt} prompt tokens"
        )
        self._check_capacity(request)
        self._requests[name] = request
        self.waiting.append(request)

    def _check_capacity(self, request: Request) -> None:
        """Alone, the request must always find its blocks: that is why nothing can get stuck."""
        options, kv, drafts = self.options, self.kv, request.max_drafts
        # The last step may verify drafts beyond max_length, and propose as many beyond those.
        longest = min(request.max_length - 1 + drafts, options.max_model_len - 1)
        for index, (group, pool) in enumerate(zip(kv.groups, kv.pools, strict=True)):
            if not kv.uses(request, group):
                continue
            step = min(options.max_num_batched_tokens, longest)
            length = longest
            if group.owner == "draft":
                step += drafts
                length = min(longest + drafts, options.max_model_len)
            needed = kv.max_blocks(group, length, step)
            if needed > pool.num_blocks:
                raise ValueError(
                    f"request {request.request_id!r} may need {needed} KV blocks of "
                    f"{kv.block_size} tokens in group {index} ({group.name}), which has "
                    f"{pool.num_blocks}: give the KV cache more memory, or lower max_tokens or "
                    f"max_model_len"
                )

    def abort(self, request_id: str) -> Request | None:
        """Finishes a request at once; returns None if there is none (it may just have finished)."""
        assert self._in_flight is None, f"abort of {request_id} while a step is in flight"
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")
        return request

    def schedule(self) -> StepPlan:
        """Plans a step with at least one request's work; there must be an unfinished request.

        The runner forgets ``dropped`` before it starts ``new``: an id may be in both. It may be
        told to forget an id that it never saw, after a step that failed.
        """
        assert self._in_flight is None, "the last step was neither committed nor failed"
        assert self._requests, "there is nothing to schedule"
        work: list[RequestWork] = []
        new: list[NewRequest] = []
        num_preempted = self.num_preemptions
        budget = self.options.max_num_batched_tokens
        index = 0
        while index < len(self.running):
            # Each of the requests behind this one gets at least one token.
            reserved = len(self.running) - index - 1
            item = self._schedule_running(self.running[index], budget - reserved)
            if item is not None:
                work.append(item)
                budget -= item.num_tokens
                index += 1
        if num_preempted == self.num_preemptions:
            while self.waiting and budget > 0 and len(self.running) < self.options.max_num_seqs:
                item = self._admit(self.waiting[0], budget)
                if item is None:
                    break
                request = self.waiting.popleft()
                self.running.append(request)
                self._known_to_runner.add(request.request_id)
                new.append(request.as_new())
                work.append(item)
                budget -= item.num_tokens
        assert work, "no request can run, although each fits alone"
        plan = StepPlan(tuple(self._dropped), tuple(new), tuple(work))
        self._dropped.clear()
        self._in_flight = plan
        return plan

    def _schedule_running(self, request: Request, budget: int) -> RequestWork | None:
        """Plans a running request's part, preempting from the end of ``running`` until its blocks
        are there; returns None if it was itself preempted."""
        num_known = min(request.num_tokens - request.num_computed, budget)
        drafts: tuple[int, ...] = ()
        if request.num_computed + num_known == request.num_tokens:
            drafts = request.drafts[: budget - num_known]
        max_drafts, target_length, draft_length = self._reach(request, num_known + len(drafts))
        while not self.kv.extend(request, target_length, draft_length):
            victim = self.running[-1]
            assert len(self.running) > 1, f"{request.request_id} doesn't fit alone"
            self._preempt(victim)
            if victim is request:
                return None
        return self._work(request, num_known + len(drafts), drafts, max_drafts)

    def _admit(self, request: Request, budget: int) -> RequestWork | None:
        """Starts a waiting request, or returns None if it must go on waiting."""
        hit = self.kv.find_hit(request)
        num_tokens = request.num_tokens - hit
        if num_tokens > budget:
            if not self.options.enable_chunked_prefill:
                return None
            num_tokens = budget
        request.num_computed = hit
        max_drafts, target_length, draft_length = self._reach(request, num_tokens)
        if not self.kv.admit(request, hit, target_length, draft_length):
            request.num_computed = 0
            return None
        request.status = RequestStatus.RUNNING
        if request.num_preemptions == 0:
            request.num_cached_tokens = hit
        return self._work(request, num_tokens, (), max_drafts)

    def _reach(self, request: Request, num_tokens: int) -> tuple[int, int, int]:
        """For a step over ``num_tokens``: how many drafts to ask for, and the target and draft
        lengths to have room for. The draft model runs after the verdict, in the same step: over
        the accepted tokens (all, at most), the one after them, and its own proposal but for the
        last token."""
        end = request.num_computed + num_tokens
        if end < request.num_tokens:
            return 0, end, end
        # Even if all are accepted now, not even the token after the next drafts, if those are
        # accepted too, may lie beyond max_model_len.
        room = self.options.max_model_len - (end + 1) - 1
        max_drafts = max(min(request.max_drafts, room), 0)
        return max_drafts, end, end + max(max_drafts, 1)

    def _work(
        self, request: Request, num_tokens: int, drafts: tuple[int, ...], max_drafts: int
    ) -> RequestWork:
        return RequestWork(
            request_id=request.request_id,
            start=request.num_computed,
            num_tokens=num_tokens,
            drafts=drafts,
            tables=self.kv.tables(request),
            max_drafts=max_drafts,
        )

    def commit(
        self,
        plan: StepPlan,
        result: StepResult,
        decide: Callable[[Request, Verdict], FinishDecision | None],
    ) -> list[tuple[Request, Verdict]]:
        """Applies a step's result; returns the plan's requests in order, with their verdicts.

        ``decide`` is asked about each verdict with tokens, before the request takes them; None
        means to keep them all and go on. The returned verdicts are cut to what was kept. All are
        asked before anything changes: if ``decide`` raises, the step is still in flight, and
        ``fail_step`` can undo it. A verdict with an error finishes its request, reason "error".
        """
        assert plan is self._in_flight, "the plan to commit is not the one in flight"
        ids = [work.request_id for work in plan.work]
        assert ids == [verdict.request_id for verdict in result.verdicts], "verdicts out of order"
        steps = []
        for work, verdict in zip(plan.work, result.verdicts, strict=True):
            request = self._requests[work.request_id]
            if verdict.error is None:
                self._check_verdict(request, work, verdict)
            decision = decide(request, verdict) if verdict.tokens and not verdict.error else None
            steps.append((request, work, verdict, decision))
        self._in_flight = None
        return [(step[0], self._apply(*step)) for step in steps]

    def _check_verdict(self, request: Request, work: RequestWork, verdict: Verdict) -> None:
        num_accepted = verdict.num_accepted
        samples = work.start + work.num_tokens - len(work.drafts) == request.num_tokens
        assert len(verdict.tokens) == (num_accepted + 1 if samples else 0), (
            f"{request.request_id}: {num_accepted} drafts accepted, but tokens {verdict.tokens}"
        )
        assert verdict.tokens[:num_accepted] == work.drafts[:num_accepted], (
            f"{request.request_id}: accepted {verdict.tokens} of drafts {work.drafts}"
        )
        assert len(verdict.next_drafts) <= work.max_drafts, (
            f"{request.request_id}: {len(verdict.next_drafts)} drafts of {work.max_drafts}"
        )

    def _apply(
        self, request: Request, work: RequestWork, verdict: Verdict, decision: FinishDecision | None
    ) -> Verdict:
        if verdict.error is not None:
            self._finish(request, "error")
            return verdict
        if decision is not None:
            kept = decision.num_tokens
            assert 0 <= kept <= len(verdict.tokens), f"keep {kept} of {verdict.tokens}"
            verdict = replace(
                verdict, tokens=verdict.tokens[:kept], logprobs=verdict.logprobs[:kept]
            )
        num_accepted = min(verdict.num_accepted, len(verdict.tokens))
        request.num_computed += work.num_tokens - len(work.drafts) + num_accepted
        request.output_token_ids.extend(verdict.tokens)
        request.drafts = verdict.next_drafts
        self.kv.commit(request, min(verdict.draft_kv_length, request.num_tokens))
        if decision is not None:
            self._finish(request, decision.reason)
        assert decision or request.num_tokens < request.max_length, (
            f"{request.request_id}: no stop rule finished it at {request.num_tokens} tokens"
        )
        return verdict

    def fail_step(self, plan: StepPlan) -> None:
        """Undoes a step whose executor raised: nothing of it is published, every running request
        is preempted, and the runner, whatever it knows by now, will be told to forget them."""
        assert plan is self._in_flight, "the plan that failed is not the one in flight"
        self._in_flight = None
        self._dropped.extend(plan.dropped)
        while self.running:
            self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        latest = self.running.pop()
        assert request is latest, f"{request.request_id} arrived before {latest.request_id}"
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.num_computed = 0
        request.drafts = ()
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.kv.free(request)
        self._drop(request)

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.free(request)
            self._drop(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]

    def _drop(self, request: Request) -> None:
        self._known_to_runner.remove(request.request_id)
        self._dropped.append(request.request_id)
