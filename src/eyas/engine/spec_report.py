"""How well drafts did: the statistics, the printed report, and warnings. Pure functions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.engine.output import RequestOutput

_RULE = "-" * 50
_LONGEST_PERIOD = 32  # tokens in a repeating cycle
_FEWEST_REPEATS = 3
_ENOUGH_DRAFTS = 100
_LOW_ACCEPTANCE = 0.05


@dataclass(frozen=True, slots=True)
class SpecDecodeStats:
    """Counts since the engine started.

    total_num_output_tokens: tokens in outputs.
    num_drafts: times that a request's draft was verified (request-steps with at least one draft).
    num_draft_tokens: the tokens of those drafts that were verified.
    num_accepted_tokens: draft tokens that the target said too; without bonus and correction tokens,
        before stop rules cut the output.
    num_draft_tokens_per_pos, num_accepted_tokens_per_pos: the same two by index in the draft.
    num_decode_steps: request-steps that continued an output (all that gave tokens but the first).
    num_decode_tokens: what they gave, accepted tokens + 1 each.
    """

    total_num_output_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_draft_tokens_per_pos: tuple[int, ...]
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_decode_steps: int
    num_decode_tokens: int

    @property
    def mean_acceptance_length(self) -> float:
        """1 + num_accepted_tokens / num_drafts: tokens per verified draft, bonus or correction
        included; 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_per_pos(self) -> tuple[float, ...]:
        """num_accepted_tokens_per_pos / num_drafts: how often a draft was accepted up to there,
        drafts that were not so long included."""
        return tuple(count / self.num_drafts for count in self.num_accepted_tokens_per_pos)

    @property
    def draft_share(self) -> float:
        """num_drafts / num_decode_steps: the share of decode steps that had a draft to verify."""
        return self.num_drafts / self.num_decode_steps if self.num_decode_steps else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """num_decode_tokens / num_decode_steps: a step without a draft counts as 1."""
        return self.num_decode_tokens / self.num_decode_steps if self.num_decode_steps else 1.0


def format_report(stats: SpecDecodeStats) -> str:
    """The report that ``eyas spec-decode`` prints, without a newline at its end."""
    lines = [
        _RULE,
        f"total_num_output_tokens: {stats.total_num_output_tokens}",
        f"num_drafts: {stats.num_drafts}",
        f"num_draft_tokens: {stats.num_draft_tokens}",
        f"num_accepted_tokens: {stats.num_accepted_tokens}",
        f"mean acceptance length: {stats.mean_acceptance_length:.2f}",
        _RULE,
    ]
    rows = zip(stats.acceptance_per_pos, stats.num_draft_tokens_per_pos, strict=True)
    for i, (acceptance, num_drafted) in enumerate(rows):
        # Against num_drafts, a position that few drafts reach looks worse than it is.
        note = "" if num_drafted == stats.num_drafts else f" (drafted {num_drafted})"
        lines.append(f"acceptance at token {i}: {acceptance:.2f}{note}")
    lines += [
        f"share of steps that drafted: {stats.draft_share:.2f}",
        f"tokens per target forward: {stats.tokens_per_forward:.2f}",
        _RULE,
    ]
    return "\n".join(lines)


def low_acceptance_warning(stats: SpecDecodeStats) -> str | None:
    """A warning if, after 100 drafts, hardly any first draft token was accepted."""
    if stats.num_drafts < _ENOUGH_DRAFTS or stats.acceptance_per_pos[0] >= _LOW_ACCEPTANCE:
        return None
    return (
        f"only {stats.acceptance_per_pos[0]:.1%} of {stats.num_drafts} drafts had their first "
        "token accepted: the draft fits neither this target nor these prompts, or is loaded wrongly"
    )


def domination_warnings(outputs: Sequence[RequestOutput]) -> list[str]:
    """What makes the acceptance of a run say little about other prompts.

    One prompt with more than half of all accepted tokens (if there are several prompts); or
    outputs that end in a repeating cycle with more than half of them. Accepted tokens are those in
    the outputs. Requests with the same prompt tokens are one prompt.
    """
    by_prompt: Counter[tuple[int, ...]] = Counter()
    request_ids: dict[tuple[int, ...], str] = {}
    total = num_in_cycles = num_cycles = 0
    for output in outputs:
        prompt = tuple(output.prompt_token_ids)
        request_ids.setdefault(prompt, output.request_id)
        for sample in output.outputs:
            num_accepted = sum(position is not None for position in sample.draft_positions)
            total += num_accepted
            by_prompt[prompt] += num_accepted
            if ends_in_cycle(sample.token_ids):
                num_cycles += 1
                num_in_cycles += num_accepted
    warnings = []
    if len(by_prompt) > 1:
        prompt, most = by_prompt.most_common(1)[0]
        if most > total / 2:
            warnings.append(
                f"the prompt of request {request_ids[prompt]} gives {most} of the {total} accepted "
                f"tokens of {len(by_prompt)} prompts: the acceptance is mostly that of one prompt"
            )
    if num_in_cycles > total / 2:
        warnings.append(
            f"{num_in_cycles} of the {total} accepted tokens belong to outputs that end in a "
            f"repeating cycle ({num_cycles} of them): repetition is easy to draft, so the "
            "acceptance is higher than on other text"
        )
    return warnings


def ends_in_cycle(token_ids: Sequence[int]) -> bool:
    """Whether more than half of the tokens, at the end, are one sequence of at most 32 tokens
    repeated at least 3 times (the last repeat may be cut)."""
    count = len(token_ids)
    for period in range(1, min(_LONGEST_PERIOD, count // _FEWEST_REPEATS) + 1):
        length = period
        while length < count and token_ids[-length - 1] == token_ids[-length - 1 + period]:
            length += 1
        if length >= _FEWEST_REPEATS * period and length > count / 2:
            return True
    return False
