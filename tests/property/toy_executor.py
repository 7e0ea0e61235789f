"""A toy executor whose KV slots hold a hash of the prefix that they were computed from.

The toy model's next token is a pure function of all tokens before it, so what any request must
output is known without an engine. Every read checks that the slot holds the content for exactly
the reader's prefix, and every write that the block is private: wrong sharing, early frees and
overwrites show up at once, in whatever batch they happen. In a group that needs the next token,
as an EAGLE draft's does, a slot's content depends on the token after it too.
"""

import random
from dataclasses import dataclass
from typing import Literal

from eyas.engine.kv_manager import KVManager
from eyas.kv_spec import KVGroupSpec
from eyas.types import BlockTable, RequestWork, StepPlan, StepResult, Verdict

VOCAB = 3


def prefix_hashes(tokens):
    """hashes[i] stands for everything about positions 0..i."""
    value, hashes = 12345, []
    for token in tokens:
        value = hash((value, token))
        hashes.append(value)
    return hashes


def first_seen(group: KVGroupSpec, position: int) -> int:
    """The first position that a query at ``position`` sees, by the definition of the mask."""
    if group.chunk is not None:
        return max(j for j in range(position + 1) if j % group.chunk == 0)
    return 0 if group.window is None else max(0, position - group.window + 1)


def next_token(tokens):
    return (prefix_hashes(tokens)[-1] >> 9) % VOCAB


def greedy(prompt, count):
    """The output of the toy model, computed alone and without KV."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ExecutorFailure(Exception):
    pass


@dataclass
class _State:
    tokens: list[int]
    num_prompt: int
    speculate: bool
    draft_length: int = -1  # unknown until the first work says where the prefix hit ends


class ToyExecutor:
    """``accuracy`` is the probability that a proposed draft token is what the target will say."""

    def __init__(self, kv: KVManager, rng: random.Random, accuracy: float = 0.5) -> None:
        self.kv = kv
        self.rng = rng
        self.accuracy = accuracy
        self.slots = [[[None] * kv.block_size for _ in range(p.num_blocks)] for p in kv.pools]
        self.states: dict[str, _State] = {}
        self.failed = False  # after a failed step the scheduler can't know what was processed
        self.fail_requests: set[str] = set()
        draft_groups = [group for group in kv.groups if group.owner == "draft"]
        self.has_draft_kv = bool(draft_groups)
        # All of a draft's layers do, or none does.
        (self.shift,) = {group.needs_next_token for group in draft_groups} or {False}

    def execute(self, plan: StepPlan, fail: Literal["", "early", "late"] = "") -> StepResult:
        """``fail``: raise before anything is done, or when the target's keys are written."""
        self.failed = self.failed or bool(fail)
        if fail == "early":
            raise ExecutorFailure
        for request_id in plan.dropped:
            state = self.states.pop(request_id, None)
            assert state is not None or self.failed, f"{request_id} dropped but unknown"
        for new in plan.new:
            assert new.request_id not in self.states
            self.states[new.request_id] = _State(
                list(new.token_ids), new.num_prompt_tokens, new.speculate
            )
        assert self.states.keys() == {work.request_id for work in plan.work}
        spans = [(work, self._span(work)) for work in plan.work]
        for work, tokens in spans:  # a layer writes the whole batch's keys before it reads
            self._write(work.tables, "target", tokens, work.start)
        if fail == "late":
            raise ExecutorFailure
        for work, tokens in spans:
            self._read(work.tables, "target", tokens, work.start)
        return StepResult(tuple(self._finish(work, tokens) for work, tokens in spans))

    def _span(self, work: RequestWork) -> list[int]:
        """All tokens up to the last one of the work's span; checks that the span is consistent."""
        state = self.states[work.request_id]
        num_known = work.num_tokens - len(work.drafts)
        assert num_known >= 1
        assert work.start + num_known <= len(state.tokens)
        assert not work.drafts or work.start + num_known == len(state.tokens)
        if state.draft_length < 0:
            state.draft_length = work.start
        return state.tokens[: work.start + num_known] + list(work.drafts)

    def _finish(self, work: RequestWork, tokens: list[int]) -> Verdict:
        state = self.states[work.request_id]
        if work.request_id in self.fail_requests:
            return Verdict(work.request_id, (), 0, (), (), (), 0, error="toy error")
        num_known = len(tokens) - len(work.drafts)
        new: list[int] = []
        if num_known == len(state.tokens):
            new.append(next_token(state.tokens))
            for draft in work.drafts:
                if draft != new[-1]:
                    break
                new.append(next_token(state.tokens + new))
            state.tokens += new
            num_known = len(state.tokens)
        drafts = self._draft(work, state, num_known) if state.speculate else ()
        length = state.draft_length if state.speculate and self.has_draft_kv else 0
        return Verdict(work.request_id, tuple(new), max(len(new) - 1, 0), (), (), drafts, length)

    def _draft(self, work: RequestWork, state: _State, known: int) -> tuple[int, ...]:
        """Catches the draft's KV up, then proposes; the last proposed token gets no KV, and where
        the next token is needed the one before it neither."""
        tokens = state.tokens[:known]
        # In a prefill chunk that doesn't end the prompt, the next token is known too.
        if self.shift and known < len(state.tokens):
            tokens.append(state.tokens[known])
        length = len(tokens) - self.shift
        if length > state.draft_length:
            self._write(work.tables, "draft", tokens, state.draft_length)
            self._read(work.tables, "draft", tokens, state.draft_length)
            state.draft_length = length
        count = self.rng.choice((0, work.max_drafts, self.rng.randint(0, work.max_drafts)))
        for index in range(count):
            if index:
                last = len(tokens) - 1 - self.shift
                self._write(work.tables, "draft", tokens, last)
                self._read(work.tables, "draft", tokens, last)
            right = next_token(tokens)
            wrong = (right + self.rng.randint(1, VOCAB - 1)) % VOCAB
            tokens.append(right if self.rng.random() < self.accuracy else wrong)
        return tuple(tokens[len(tokens) - count :])

    def _tables(self, tables: tuple[BlockTable, ...], owner: str):
        assert len(tables) == len(self.kv.groups)
        for index, (group, table) in enumerate(zip(self.kv.groups, tables, strict=True)):
            if group.owner == owner:
                yield index, group, table

    def _locate(self, table: BlockTable, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.kv.block_size)
        assert table.first <= block < table.first + len(table.blocks), (
            f"position {position} is outside blocks {table.first} + {len(table.blocks)}"
        )
        return table.blocks[block - table.first], offset

    def _contents(self, index: int, group: KVGroupSpec, tokens: list[int]) -> list[object]:
        """What the group's KV at each position that ``tokens`` determine must be."""
        hashes = prefix_hashes(tokens)[group.needs_next_token :]
        return [(group.owner, index, value) for value in hashes]

    def _write(self, tables, owner: str, tokens: list[int], start: int) -> None:
        for index, group, table in self._tables(tables, owner):
            contents = self._contents(index, group, tokens)
            for position in range(start, len(contents)):
                block, offset = self._locate(table, position)
                assert self.kv.pools[index].hash_of(block) is None, "a published block is written"
                assert not self.kv.pools[index].is_free(block), "a free block is written"
                self.slots[index][block][offset] = contents[position]

    def _read(self, tables, owner: str, tokens: list[int], start: int) -> None:
        for index, group, table in self._tables(tables, owner):
            contents = self._contents(index, group, tokens)
            # The first query sees furthest back.
            for position in range(first_seen(group, start), len(contents)):
                block, offset = self._locate(table, position)
                found = self.slots[index][block][offset]
                assert found == contents[position], (
                    f"group {index}: position {position} of {len(contents)} holds {found}"
                )

    def is_published(self, index: int, tokens: list[int], length: int) -> bool:
        """Whether published blocks of a group hold all that the token at ``length`` sees before
        it."""
        group, pool, size = self.kv.groups[index], self.kv.pools[index], self.kv.block_size
        held = {
            tuple(content)
            for block, content in enumerate(self.slots[index])
            if pool.hash_of(block) is not None
        }
        contents = self._contents(index, group, tokens)
        start = first_seen(group, length) // size * size
        return all(tuple(contents[i : i + size]) in held for i in range(start, length, size))

    def poison(self) -> None:
        """Ruins every block that is neither in use nor published."""
        for pool, slots in zip(self.kv.pools, self.slots, strict=True):
            for block in range(pool.num_blocks):
                if pool.is_free(block) and pool.hash_of(block) is None:
                    slots[block] = [None] * self.kv.block_size
