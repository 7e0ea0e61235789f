"""Counters of an engine. Every metric's ``help`` is its formula."""

from collections import Counter as Tally
from dataclasses import dataclass, field

from eyas.engine.scheduler import Scheduler
from eyas.engine.spec_report import SpecDecodeStats
from eyas.types import RequestWork, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """``labels`` tell apart metrics of one name."""

    name: str
    help: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Counters by index."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """Goes up and down."""

    value: float


class EngineMetrics:
    """What the engine has done since it started."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_decode_steps = 0
        self.num_decode_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens_per_pos: list[int] = []
        self.num_accepted_tokens_per_pos: list[int] = []
        self.num_finished: Tally[str] = Tally()

    def record(self, work: RequestWork, verdict: Verdict, num_kept: int, num_before: int) -> None:
        """Counts one verdict as it came: the request had ``num_before`` output tokens, and stop
        rules let it keep ``num_kept`` of the new ones."""
        if verdict.error is not None:
            return
        self.num_generation_tokens += num_kept
        if verdict.tokens and num_before > 0:
            self.num_decode_steps += 1
            self.num_decode_tokens += len(verdict.tokens)
        if work.drafts:
            self.num_drafts += 1
            _add_one_to_first(self.num_draft_tokens_per_pos, len(work.drafts))
            _add_one_to_first(self.num_accepted_tokens_per_pos, verdict.num_accepted)

    def spec_stats(self) -> SpecDecodeStats:
        """A snapshot of what the report on speculation needs."""
        num_positions = len(self.num_draft_tokens_per_pos)
        accepted = self.num_accepted_tokens_per_pos
        return SpecDecodeStats(
            total_num_output_tokens=self.num_generation_tokens,
            num_drafts=self.num_drafts,
            num_draft_tokens=sum(self.num_draft_tokens_per_pos),
            num_accepted_tokens=sum(accepted),
            num_draft_tokens_per_pos=tuple(self.num_draft_tokens_per_pos),
            num_accepted_tokens_per_pos=(*accepted, *[0] * (num_positions - len(accepted))),
            num_decode_steps=self.num_decode_steps,
            num_decode_tokens=self.num_decode_tokens,
        )

    def snapshot(self, scheduler: Scheduler) -> list[Metric]:
        """All metrics, under vLLM's names where it has them, with the prefix ``eyas:``."""
        stats, kv = self.spec_stats(), scheduler.kv
        finished = [
            Counter(
                name="eyas:num_requests_finished",
                help="Finished samples (a request for n counts n times) by finish reason.",
                labels={"finished_reason": reason},
                value=self.num_finished[reason],
            )
            for reason in ("stop", "length", "abort", "error")
        ]
        counters = [
            Counter(name=f"eyas:{name}", help=formula, value=value)
            for name, value, formula in (
                ("num_steps", self.num_steps, "Steps whose result was committed."),
                (
                    "prompt_tokens",
                    self.num_prompt_tokens,
                    "Prompt tokens of samples that got their first output token, cached or not.",
                ),
                (
                    "generation_tokens",
                    self.num_generation_tokens,
                    "Tokens in outputs, after stop rules.",
                ),
                (
                    "prefix_cache_queries",
                    kv.num_queried_tokens,
                    "Prompt tokens of samples that looked into the prefix cache when they started.",
                ),
                ("prefix_cache_hits", kv.num_hit_tokens, "Those of them that the cache served."),
                (
                    "num_preemptions",
                    scheduler.num_preemptions,
                    "Times that a running sample lost its KV and had to wait.",
                ),
                (
                    "num_decode_steps",
                    stats.num_decode_steps,
                    "Sample-steps that continued an output: all that gave tokens but the first.",
                ),
                (
                    "num_decode_tokens",
                    stats.num_decode_tokens,
                    "Tokens that decode steps gave (accepted + 1 each), before stop rules. "
                    "Tokens per target forward = num_decode_tokens / num_decode_steps.",
                ),
                (
                    "spec_decode_num_drafts",
                    stats.num_drafts,
                    "Sample-steps that verified a draft of at least one token. "
                    "Share of steps that drafted = spec_decode_num_drafts / num_decode_steps.",
                ),
                (
                    "spec_decode_num_draft_tokens",
                    stats.num_draft_tokens,
                    "Draft tokens that were verified; proposed ones that never were don't count.",
                ),
                (
                    "spec_decode_num_accepted_tokens",
                    stats.num_accepted_tokens,
                    "Draft tokens that the target said too, before stop rules, without bonus and "
                    "correction tokens. Mean acceptance length = "
                    "1 + spec_decode_num_accepted_tokens / spec_decode_num_drafts.",
                ),
            )
        ]
        vectors = [
            Vector(
                name="eyas:spec_decode_num_draft_tokens_per_pos",
                help="spec_decode_num_draft_tokens by index in the draft.",
                values=list(stats.num_draft_tokens_per_pos),
            ),
            Vector(
                name="eyas:spec_decode_num_accepted_tokens_per_pos",
                help="spec_decode_num_accepted_tokens by index in the draft. "
                "Acceptance at i = values[i] / spec_decode_num_drafts.",
                values=list(stats.num_accepted_tokens_per_pos),
            ),
        ]
        usage = max(
            used / pool.num_blocks
            for used, pool in zip(kv.num_used_blocks(), kv.pools, strict=True)
        )
        gauges = [
            Gauge(name=f"eyas:{name}", help=formula, value=value)
            for name, value, formula in (
                ("num_requests_running", len(scheduler.running), "Samples that hold KV."),
                ("num_requests_waiting", len(scheduler.waiting), "Samples that wait, also again."),
                (
                    "kv_cache_usage_perc",
                    usage,
                    "KV blocks held by running samples / blocks, in the fullest group; 1 is full.",
                ),
            )
        ]
        blocks = [
            Gauge(
                name=f"eyas:kv_blocks_{name}",
                help=formula,
                labels={"group": str(index), "kind": group.name},
                value=count,
            )
            for name, formula, counts in (
                ("total", "KV blocks of a layer group.", [pool.num_blocks for pool in kv.pools]),
                ("held", "Those that running samples hold.", kv.num_used_blocks()),
                (
                    "cached",
                    "Those that hold a prefix and nobody holds them.",
                    kv.num_cached_blocks(),
                ),
            )
            for index, (group, count) in enumerate(zip(kv.groups, counts, strict=True))
        ]
        return [*finished, *counters, *vectors, *gauges, *blocks]


def _add_one_to_first(counts: list[int], number: int) -> None:
    """Adds 1 to the first ``number`` counts, of which there may be fewer so far."""
    counts.extend([0] * (number - len(counts)))
    for i in range(number):
        counts[i] += 1
