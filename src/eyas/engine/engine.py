"""Engine: requests in, outputs out; in between, one step after the other."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from eyas.engine.collector import OutputKind, RequestCollector, SampleCollector
from eyas.engine.inputs import CheckedPrompt, InputReader, Prompt
from eyas.engine.kv_manager import KVManager
from eyas.engine.kv_sizing import KVDemand, size_kv
from eyas.engine.metrics import EngineMetrics, Metric
from eyas.engine.output import RequestOutput
from eyas.engine.request import Request
from eyas.engine.scheduler import FinishDecision, Scheduler, SchedulerOptions
from eyas.engine.spec_report import SpecDecodeStats
from eyas.engine.stopping import OutputText, stop_rules
from eyas.executor.base import Executor
from eyas.sampling.params import SamplingParams
from eyas.tokenizer import IncrementalDecoder, Tokenizer
from eyas.types import StepPlan, StepResult, Verdict


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``vocab_size`` and ``eos_token_ids`` are the model's. ``max_drafts`` is K, the tokens drafted
    per step for requests that don't choose; None: there is no drafter. ``seed`` seeds the requests
    that bring none. ``kv_cache_memory`` is in bytes; None sizes it from what is free."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: SchedulerOptions
    max_drafts: int | None = None
    seed: int = 0
    block_size: int = 16
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True


class Engine:
    """One model's engine; not for several threads at once.

    Samples of a request are the scheduler's requests ``<request_id>#<index>``: no two users' ids
    can lead to the same one.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        clock: Callable[[], float] = time.monotonic,
        num_blocks: tuple[int, ...] | None = None,
    ) -> None:
        """Sizes (unless ``num_blocks`` per group is given) and allocates the KV cache. Without a
        tokenizer, prompts are token ids and ``detokenize`` must be False. ValueError if the memory
        can't hold the KV of one request of max_model_len tokens."""
        limits = options.limits
        demand = KVDemand(
            executor.groups,
            executor.kv_element_size,
            options.block_size,
            limits,
            options.max_drafts or 0,
        )
        num_blocks = num_blocks or size_kv(demand, options.kv_cache_memory)
        executor.allocate_kv(num_blocks, options.block_size)
        kv = KVManager(
            executor.groups, num_blocks, options.block_size, options.enable_prefix_caching
        )
        self.executor = executor
        self.scheduler = Scheduler(limits, kv)
        self.tokenizer = tokenizer
        self.options = options
        self.metrics = EngineMetrics()
        self._inputs = InputReader(
            tokenizer, options.vocab_size, limits.max_model_len, options.eos_token_ids
        )
        self._clock = clock
        self._num_arrivals = 0
        self._requests: dict[str, RequestCollector] = {}
        self._samples: dict[str, tuple[RequestCollector, SampleCollector]] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        output_kind: OutputKind = "cumulative",
        truncate_prompt_tokens: int | None = None,
    ) -> None:
        """Queues a request. ValueError, and nothing changes, for one that can't be honoured.

        "final_only" leaves out of ``step`` the outputs of requests that aren't finished.
        ``truncate_prompt_tokens``: see ``InputReader.prompt``.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r}: it must be a string")
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already running: use another request_id")
        checked = self._inputs.prompt(prompt, truncate_prompt_tokens)
        samples = self._samples_of(request_id, checked, params)
        collector = RequestCollector(
            request_id,
            checked,
            samples,
            output_kind,
            self._token_text(params),
            self._clock(),
        )
        for sample in samples:
            # Samples differ only in their index: if one is refused, it is the first.
            self.scheduler.add(sample.request)
            self._samples[sample.request.request_id] = collector, sample
        self._requests[request_id] = collector
        self._num_arrivals += 1

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request between steps, and returns its last output (None if there is no such
        request: it may just have finished). No step returns it again."""
        collector = self._requests.get(request_id)
        if collector is None:
            return None
        for sample in collector.samples:
            if self.scheduler.abort(sample.request.request_id) is not None:
                sample.end("abort")
                self._finish(collector, sample)
        return collector.build()

    def step(self) -> list[RequestOutput]:
        """One step; the outputs of requests that got tokens or ended in it.

        If the executor raises, so does this, and nothing of the step has happened: the running
        requests are computed again from their tokens, unless they are aborted.
        """
        if not self.scheduler.has_unfinished_requests():
            return []
        plan = self.scheduler.schedule()
        try:
            result = self.executor.execute(plan)
            kept = self.scheduler.commit(plan, result, self._decide)
        except BaseException:  # KeyboardInterrupt too: a later abort must find things in order
            self._undo(plan)
            raise
        return self._collect(plan, result, kept)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def get_metrics(self) -> list[Metric]:
        return self.metrics.snapshot(self.scheduler)

    def spec_stats(self) -> SpecDecodeStats:
        """A snapshot of the statistics on speculation, for ``spec_report``."""
        return self.metrics.spec_stats()

    def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes; running requests keep what they use."""
        self.scheduler.kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """AssertionError if a KV block or a request is lost; for tests, between steps."""
        live = self.scheduler.requests
        self.scheduler.kv.check_integrity(live)
        assert self._samples.keys() == {request.request_id for request in live}
        num_unfinished = sum(collector.num_unfinished for collector in self._requests.values())
        assert num_unfinished == len(self._samples), "a request's samples are miscounted"

    def shutdown(self) -> None:
        """Ends the executor; the engine can't step afterwards."""
        self.executor.shutdown()

    def _samples_of(
        self, request_id: str, prompt: CheckedPrompt, params: SamplingParams
    ) -> list[SampleCollector]:
        limits, num_prompt = self.options.limits, len(prompt.token_ids)
        rules = self._inputs.rules(params)
        stops = stop_rules(params, self.options.eos_token_ids, limits.max_model_len - num_prompt)
        seed = self._next_seed() if params.seed is None else params.seed
        max_drafts = self._max_drafts(params)
        return [
            SampleCollector(
                Request(
                    request_id=f"{request_id}#{index}",
                    prompt_token_ids=prompt.token_ids,
                    params=params,
                    # One sample's prompt logprobs are all samples': the others may use the cache.
                    rules=rules if index == 0 else replace(rules, prompt_logprobs=None),
                    seed=seed,
                    sample_index=index,
                    max_length=num_prompt + stops.max_tokens,
                    max_drafts=max_drafts,
                ),
                lambda: OutputText(stops, self._decoder(prompt, params)),
                self._token_text(params),
            )
            for index in range(params.n)
        ]

    def _next_seed(self) -> int:
        """63 bits made from the engine's seed and the number of requests before this one, so that
        the same calls give the same outputs."""
        text = f"{self.options.seed} {self._num_arrivals}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _max_drafts(self, params: SamplingParams) -> int:
        own, default = params.num_speculative_tokens, self.options.max_drafts
        if default is None and own:
            raise ValueError(
                f"num_speculative_tokens is {own}, but this engine has no drafter: "
                "give it a speculative_config"
            )
        return (default or 0) if own is None else own

    def _decoder(self, prompt: CheckedPrompt, params: SamplingParams) -> IncrementalDecoder | None:
        if not params.detokenize:
            return None
        assert self.tokenizer is not None
        return IncrementalDecoder(self.tokenizer, prompt.token_ids, params.skip_special_tokens)

    def _token_text(self, params: SamplingParams) -> Callable[[int], str] | None:
        return self.tokenizer.token_text if self.tokenizer and params.detokenize else None

    def _decide(self, request: Request, verdict: Verdict) -> FinishDecision | None:
        return self._samples[request.request_id][1].decide(verdict)

    def _undo(self, plan: StepPlan) -> None:
        self.scheduler.fail_step(plan)
        for work in plan.work:
            self._samples[work.request_id][1].rewind()

    def _collect(
        self, plan: StepPlan, result: StepResult, kept: list[tuple[Request, Verdict]]
    ) -> list[RequestOutput]:
        """Books a committed step, and builds the outputs that somebody wants."""
        now = self._clock()
        self.metrics.num_steps += 1
        changed: dict[str, RequestCollector] = {}
        for work, verdict, (request, cut) in zip(plan.work, result.verdicts, kept, strict=True):
            collector, sample = self._samples[request.request_id]
            num_before = len(request.output_token_ids) - len(cut.tokens)
            self.metrics.record(work, verdict, len(cut.tokens), num_before)
            if cut.tokens and num_before == 0:
                self.metrics.num_prompt_tokens += len(request.prompt_token_ids)
            collector.add(work, verdict, now)
            if verdict.error is not None:
                sample.end("error", verdict.error)
            if request.finish_reason is not None:
                self._finish(collector, sample)
            if cut.tokens or request.finish_reason is not None:
                changed[collector.request_id] = collector
        return [
            collector.build()
            for collector in changed.values()
            if collector.kind == "cumulative" or collector.num_unfinished == 0
        ]

    def _finish(self, collector: RequestCollector, sample: SampleCollector) -> None:
        """Lets go of a sample that the scheduler has finished."""
        reason = sample.request.finish_reason
        assert reason is not None
        self.metrics.num_finished[reason] += 1
        del self._samples[sample.request.request_id]
        collector.finish_one(self._clock())
        if collector.num_unfinished == 0:
            del self._requests[collector.request_id]
