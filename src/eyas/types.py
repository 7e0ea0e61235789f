"""Frozen values that cross boundaries: engine -> executor -> runner and back.

Plain numbers, strings and tuples only, so that they can be sent to another process. Hidden states
and logits never appear here: they stay in the worker that computed them.
"""

from dataclasses import dataclass

from eyas.sampling.rules import SamplingRules


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A request's KV blocks in one layer group: ``blocks[i]`` holds the
    ``block_size`` positions from ``(first + i) * block_size`` on; earlier blocks were freed."""

    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request's state as the runner needs it; sent when it starts or restarts after preemption.

    ``token_ids`` is the prompt and, after a preemption, the output so far; ``num_prompt_tokens``
    says where the output begins. ``sample_index`` is c in 0..n-1 of a request for n samples.
    ``speculate`` says whether the drafter may ever work for this request (it owns draft KV iff so).
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    rules: SamplingRules
    seed: int
    sample_index: int
    speculate: bool


@dataclass(frozen=True, slots=True)
class RequestWork:
    """What one request does in one step.

    The forward covers positions ``start`` to ``start + num_tokens - 1``: known tokens first, then
    ``drafts`` (the last ``len(drafts)`` of them). It samples iff it reaches the last known token.
    ``tables`` has one entry per layer group, in the runner's group order; a group that the request
    does not use has an empty table. ``max_drafts`` is how many tokens to propose for the next step.
    """

    request_id: str
    start: int
    num_tokens: int
    drafts: tuple[int, ...]
    tables: tuple[BlockTable, ...]
    max_drafts: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: requests to forget, requests to (re)start, then the work, in batch order."""

    dropped: tuple[str, ...]
    new: tuple[NewRequest, ...]
    work: tuple[RequestWork, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself first, then the top ones by rank.

    Log-softmax of the raw target logits (before masks, penalties and temperature). ``ranks[i]``
    is 1 + the number of tokens with a greater log-probability than ``token_ids[i]``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step decided for one request.

    ``tokens`` are the new output tokens: the accepted drafts, then one more (the bonus token if all
    were accepted, else the correction); empty for a prefill chunk that does not end the prompt.
    ``num_accepted`` counts the accepted among the work's drafts. ``logprobs`` has one entry per
    token if asked for; ``prompt_logprobs`` one per prompt position p + 1 predicted by the rows p of
    this step. ``next_drafts`` is the proposal for the next step. ``draft_kv_length`` is how many
    leading positions the draft's KV groups now hold, from accepted tokens only (0: none).
    ``error`` is set when the request failed alone (its other fields are then empty).
    """

    request_id: str
    tokens: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    next_drafts: tuple[int, ...]
    draft_kv_length: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One verdict per work item of the plan, in the same order."""

    verdicts: tuple[Verdict, ...]
