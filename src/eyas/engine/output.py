"""What a request gives its user: vLLM's names, and a few fields that only Eyas has."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-softmax of the raw target logits, and its ``rank`` (1 is the most probable).

    ``decoded_token`` is None without detokenisation.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request, up to now.

    ``token_ids`` has everything the model said, the token that ended it included; ``text`` leaves
    out what the stop rules drop and, until it is finished, what may still become a stop string.
    ``logprobs`` has one dict per token if asked for, with the token itself first, and
    ``cumulative_logprob`` the sum over the tokens themselves. ``stop_reason`` is the stop string or
    stop token that ended the output; None for an end-of-sequence token. ``error`` says why the
    finish reason is "error".

    Only in Eyas: ``seed`` is the one used, so that a request without a seed can be repeated;
    ``draft_positions`` has one entry per token: its index in the draft that proposed it, None for
    a token that the target had to say itself (a bonus token, a correction, or no draft).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    seed: int
    draft_positions: list[int | None]
    error: str | None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times are seconds of ``time.monotonic()``; counts are sums over the request's samples.

    ``num_drafts``: steps that verified a draft; ``num_draft_tokens``: the tokens of those drafts;
    ``num_accepted_tokens``: those of them that equalled the target's, also beyond a stop.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request up to now; ``outputs`` has one entry per sample, all cumulative.

    ``prompt`` is None if token ids were given. ``prompt_logprobs`` has an entry per prompt token,
    None for the first. ``num_cached_tokens``: prompt tokens of the first sample that came from the
    prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
