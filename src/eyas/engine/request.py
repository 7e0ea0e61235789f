"""Request: the scheduler's state of one sample sequence."""

from dataclasses import dataclass, field
from enum import Enum

from eyas.sampling.params import SamplingParams
from eyas.sampling.rules import SamplingRules
from eyas.types import NewRequest


class RequestStatus(Enum):
    """A preempted request is WAITING again. ``finish_reason`` says why one is FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sample sequence, from arrival to finish.

    The first block is set by the engine, the second is kept by the scheduler. ``max_length`` is
    the total number of tokens (prompt and output) at which the engine's stop rules finish the
    request at the latest. ``max_drafts`` is how many tokens are drafted per step (0: no
    speculation). ``num_computed`` counts the leading tokens whose target KV is written and
    accepted; the newest sampled token has none yet. ``num_cached_tokens`` counts the prompt tokens
    that came from the prefix cache when the request first started.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    rules: SamplingRules
    seed: int
    sample_index: int
    max_length: int
    max_drafts: int

    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafts: tuple[int, ...] = ()
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    # Chain hashes of the leading full blocks: a cache that KVManager extends.
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def speculate(self) -> bool:
        return self.max_drafts > 0

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The known tokens at positions ``start`` to ``stop - 1``."""
        num_prompt = len(self.prompt_token_ids)
        output = self.output_token_ids[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        return self.prompt_token_ids[start:stop] + tuple(output)

    def as_new(self) -> NewRequest:
        """What the runner is told when this request starts or restarts."""
        return NewRequest(
            request_id=self.request_id,
            token_ids=self.tokens(0, self.num_tokens),
            num_prompt_tokens=len(self.prompt_token_ids),
            rules=self.rules,
            seed=self.seed,
            sample_index=self.sample_index,
            speculate=self.speculate,
        )
