"""An executor whose model is a function of the prefix, so that every output is known without it."""

import random

from eyas.kv_spec import KVGroupSpec
from eyas.types import StepResult, TokenLogprobs, Verdict

VOCAB = 260  # tests/checkpoints.py's tiny tokenizer


def next_token(tokens, seed=0, sample_index=0, vocab=VOCAB):
    return random.Random(f"{tokens[-4:]} {len(tokens)} {seed} {sample_index}").randrange(vocab)


def logprobs_at(tokens, token_id, top, seed=0):
    """A made-up entry for ``token_id`` after ``tokens``, followed by ``top`` others."""
    rng = random.Random(f"{tokens} {token_id} {seed}")
    ids = (token_id, *rng.sample([v for v in range(VOCAB) if v != token_id], top))
    return TokenLogprobs(ids, tuple(-rng.random() for _ in ids), tuple(range(1, len(ids) + 1)))


class FakeExecutor:
    """``accuracy`` is how often a draft token is the target's; ``raise_at`` maps step numbers to
    what to raise there; ``fail_ids`` are the scheduler's ids of requests that fail alone."""

    def __init__(self, accuracy=0.6, drafter_seed=0, model=next_token):
        self.groups = (KVGroupSpec("target", 1, 1, 1),)
        self.kv_element_size = 4
        self.accuracy = accuracy
        self.model = model
        self.rng = random.Random(drafter_seed)
        self.allocated = None
        self.raise_at = {}
        self.fail_ids = {}
        self.num_steps = 0
        self.is_shut_down = False
        self.plans = []
        self.states = {}

    def allocate_kv(self, num_blocks, block_size):
        assert self.allocated is None
        self.allocated = num_blocks, block_size

    def shutdown(self):
        self.is_shut_down = True

    def execute(self, plan):
        for request_id in plan.dropped:
            self.states.pop(request_id, None)
        for new in plan.new:
            self.states[new.request_id] = (new, list(new.token_ids))
        self.plans.append(plan)
        self.num_steps += 1
        verdicts = tuple(map(self._verdict, plan.work))
        if self.num_steps in self.raise_at:
            raise self.raise_at[self.num_steps]
        return StepResult(verdicts)

    def _next(self, new, tokens):
        return self.model(tokens, new.seed, new.sample_index)

    def _verdict(self, work):
        if work.request_id in self.fail_ids:
            return Verdict(
                work.request_id, (), 0, (), (), (), 0, error=self.fail_ids[work.request_id]
            )
        new, tokens = self.states[work.request_id]
        top = new.rules.prompt_logprobs
        end = work.start + work.num_tokens - len(work.drafts)
        prompt_logprobs = (
            ()
            if top is None
            else tuple(
                logprobs_at(tokens[:position], tokens[position], top)
                for position in range(work.start + 1, min(end + 1, new.num_prompt_tokens))
            )
        )
        said, entries = [], []
        if end == len(tokens):
            drafts = list(work.drafts)
            while True:
                token_id = self._next(new, tokens)
                if new.rules.logprobs is not None:
                    entries.append(logprobs_at(tokens, token_id, new.rules.logprobs))
                said.append(token_id)
                tokens.append(token_id)
                if not drafts or drafts.pop(0) != token_id:
                    break
        return Verdict(
            work.request_id,
            tuple(said),
            max(len(said) - 1, 0),
            tuple(entries),
            prompt_logprobs,
            self._draft(new, tokens, work.max_drafts) if said else (),
            0,
        )

    def _draft(self, new, tokens, count):
        tokens, start = list(tokens), len(tokens)
        for _ in range(count):
            right = self._next(new, tokens)
            is_right = self.rng.random() < self.accuracy
            tokens.append(right if is_right else (right + 1) % VOCAB)
        return tuple(tokens[start:])
