"""Scheduler and KV manager under random load: true KV contents, exact accounting, no deadlock."""

import contextlib
import random
import re
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy_executor import VOCAB, ExecutorFailure, ToyExecutor, first_seen, greedy

from eyas.engine.kv_manager import KVManager
from eyas.engine.request import Request, RequestStatus
from eyas.engine.scheduler import FinishDecision, Scheduler, SchedulerOptions
from eyas.kv_spec import KVGroupSpec
from eyas.sampling.rules import SamplingRules

# Prompts are cut from these, so that many share a prefix.
BASES = [random.Random(seed).choices(range(VOCAB), k=64) for seed in range(3)]


def group(owner, window=None, chunk=None, needs_next_token=False):
    return KVGroupSpec(owner, 1, 1, 1, window, chunk, needs_next_token)


def make_request(name, prompt, max_tokens, max_drafts=0, max_model_len=64, prompt_logprobs=None):
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=None,
        rules=SamplingRules(prompt_logprobs=prompt_logprobs),
        seed=0,
        sample_index=0,
        max_length=min(len(prompt) + max_tokens, max_model_len),
        max_drafts=max_drafts,
    )


@dataclass
class Setup:
    groups: tuple
    num_blocks: tuple
    block_size: int
    caching: bool
    options: SchedulerOptions


@st.composite
def setups(draw):
    block_size = draw(st.integers(1, 3) | st.integers(1, 16))
    reaches = st.one_of(
        st.just((None, None)),
        st.tuples(st.integers(1, 20), st.none()),
        st.tuples(st.none(), st.integers(1, 5).map(lambda n: n * block_size)),
    )
    targets = draw(st.lists(reaches, min_size=1, max_size=3))
    drafts = draw(st.lists(reaches, max_size=2))
    shift = draw(st.booleans())
    groups = (
        *(group("target", *reach) for reach in targets),
        *(group("draft", *reach, shift) for reach in drafts),
    )
    max_model_len = draw(st.integers(8, 48))
    enough = -(-max_model_len // block_size)
    num_blocks = tuple(draw(st.integers((enough + 1) // 2, 2 * enough + 2)) for _ in groups)
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    budget = least + draw(st.integers(0, 20))
    options = SchedulerOptions(max_num_seqs, budget, max_model_len, chunked)
    return Setup(groups, num_blocks, block_size, draw(st.booleans()), options)


class Harness:
    """A scheduler, the toy executor, and stop rules: ``max_length``, and perhaps a stop token."""

    def __init__(self, setup, seed=0, accuracy=0.5):
        self.setup = setup
        self.kv = KVManager(setup.groups, setup.num_blocks, setup.block_size, setup.caching)
        self.scheduler = Scheduler(setup.options, self.kv)
        self.executor = ToyExecutor(self.kv, random.Random(seed), accuracy)
        self._find_hit, self.kv.find_hit = self.kv.find_hit, self.find_hit
        self.num_hits = 0
        self.stop_tokens = {}
        self.plans = []
        self.ends = {}

    def add(self, request, stop_token=None):
        self.scheduler.add(request)
        self.stop_tokens[request.request_id] = stop_token

    def find_hit(self, request):
        """The manager's answer, after a comparison with what published blocks really hold: a hit is
        the longest one whose next token finds all that it sees, in every group."""
        size, hit = self.kv.block_size, self._find_hit(request)
        tokens = list(request.tokens(0, request.num_tokens))
        expected = 0
        if self.setup.caching and request.rules.prompt_logprobs is None:
            expected = max(
                length
                for length in range(0, request.num_tokens, size)
                if all(
                    self.executor.is_published(index, tokens, length)
                    for index, group in enumerate(self.kv.groups)
                    if group.owner == "target" or request.max_drafts > 0
                )
            )
        assert hit == expected
        self.num_hits += hit > 0
        return hit

    def decide(self, request, verdict):
        for count, token in enumerate(verdict.tokens, start=1):
            if token == self.stop_tokens[request.request_id]:
                return FinishDecision(count, "stop")
            if request.num_tokens + count == request.max_length:
                return FinishDecision(count, "length")
        return None

    def expected(self, request):
        output = greedy(
            request.prompt_token_ids, request.max_length - len(request.prompt_token_ids)
        )
        stop = self.stop_tokens[request.request_id]
        return output[: output.index(stop) + 1] if stop in output else output

    def step(self, fail=""):
        drafts = {request.request_id: request.drafts for request in self.scheduler.running}
        num_preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.check_plan(plan, drafts)
        self.check_tables(plan)
        if self.scheduler.num_preemptions > num_preemptions:
            assert not plan.new, "a step that lacks blocks starts a request"
        try:
            result = self.executor.execute(plan, fail)
        except ExecutorFailure:
            self.scheduler.fail_step(plan)
            outcomes = []
        else:
            outcomes = self.scheduler.commit(plan, result, self.decide)
            assert [request.request_id for request, _ in outcomes] == [
                work.request_id for work in plan.work
            ]
        self.executor.poison()
        self.check()
        for request, verdict in outcomes:
            if request.finish_reason == "error":
                assert verdict.error == "toy error"
            elif request.status is RequestStatus.FINISHED:
                assert request.output_token_ids == self.expected(request)
                num_new = len(verdict.tokens)
                assert request.output_token_ids[-num_new:] == list(verdict.tokens)
        return outcomes

    def check_plan(self, plan, drafts):
        options = self.setup.options
        assert sum(work.num_tokens for work in plan.work) <= options.max_num_batched_tokens
        assert 1 <= len(plan.work) <= options.max_num_seqs
        running = self.scheduler.running
        assert [work.request_id for work in plan.work] == [r.request_id for r in running]
        for work, request in zip(plan.work, running, strict=True):
            end = work.start + work.num_tokens
            assert end <= options.max_model_len - 1
            proposed = drafts.get(work.request_id, ())
            assert work.drafts == proposed[: len(work.drafts)]
            if end < request.num_tokens:
                assert work.max_drafts == 0
            elif end + 2 + request.max_drafts <= options.max_model_len:
                assert work.max_drafts == request.max_drafts

    def check_tables(self, plan):
        """A table begins with what its request's next token sees, and ends with the furthest step;
        one with a window or chunk holds no more than that and the step in flight."""
        size, options = self.kv.block_size, self.setup.options
        for work, request in zip(plan.work, self.scheduler.running, strict=True):
            if any(new.request_id == work.request_id for new in plan.new):
                self.ends[work.request_id] = 0
            end = self.ends[work.request_id] = max(
                self.ends[work.request_id], work.start + work.num_tokens
            )
            for group, table in zip(self.kv.groups, work.tables, strict=True):
                if not self.kv.uses(request, group):
                    assert table.blocks == ()
                    continue
                step = options.max_num_batched_tokens
                if group.owner == "target":
                    assert table.first == first_seen(group, work.start) // size
                    assert table.first + len(table.blocks) == -(-end // size)
                else:
                    step += request.max_drafts
                if group.chunk is not None:
                    assert len(table.blocks) * size < group.chunk - 1 + step + size
                elif group.window is not None:
                    assert len(table.blocks) * size <= group.window - 1 + step + 2 * (size - 1)

    def check(self):
        self.kv.check_integrity(self.scheduler.requests)
        if not self.scheduler.has_unfinished_requests():
            assert all(pool.num_free == pool.num_blocks for pool in self.kv.pools)
            assert self.kv.num_used_blocks() == (0,) * len(self.kv.pools)

    def drain(self):
        """Runs to the end. The oldest request computes at least one token per step, and is never
        preempted, so this bounds the steps."""
        bound = sum(request.max_length for request in self.scheduler.requests)
        for count in range(bound + 1):
            if not self.scheduler.has_unfinished_requests():
                return
            assert count < bound, "no end in sight"
            self.step()


REQUESTS = st.tuples(
    st.sampled_from(BASES),
    st.integers(0, 40),  # how much of the base
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),  # what follows it
    st.integers(1, 24),  # max_tokens
    st.sampled_from((0, 1, 2, 3, 5)),  # max_drafts
    st.sampled_from((None, None, 0)),  # stop token
    st.sampled_from((None, None, None, 1)),  # prompt_logprobs
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(setup=setups(), seed=st.integers(0, 1000), accuracy=st.sampled_from((0, 0.5, 1)))
    def start(self, setup, seed, accuracy):
        self.harness = Harness(setup, seed, accuracy)
        self.added = []

    @rule(new=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, new):
        max_model_len = self.harness.setup.options.max_model_len
        for base, num_base, suffix, max_tokens, max_drafts, stop_token, prompt_logprobs in new:
            request = make_request(
                f"r{len(self.added)}",
                (base[:num_base] + suffix)[: max_model_len - 1],
                max_tokens,
                max_drafts,
                max_model_len,
                prompt_logprobs,
            )
            # It is refused if the pools are too small for it; the unit tests say exactly when.
            with contextlib.suppress(ValueError):
                self.harness.add(request, stop_token)
                self.added.append(request)

    def busy(self):
        return self.harness.scheduler.has_unfinished_requests()

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            if self.busy():
                self.harness.step()

    @precondition(busy)
    @rule(when=st.sampled_from(("early", "late")))
    def failing_step(self, when):
        self.harness.step(fail=when)

    @precondition(busy)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(list(self.harness.scheduler.requests)))
        assert self.harness.scheduler.abort(request.request_id) is request
        assert self.harness.scheduler.abort(request.request_id) is None
        assert request.finish_reason == "abort"
        output = self.harness.expected(request)
        assert request.output_token_ids == output[: len(request.output_token_ids)]

    @precondition(busy)
    @rule(data=st.data())
    def request_error(self, data):
        request = data.draw(st.sampled_from(list(self.harness.scheduler.requests)))
        self.harness.executor.fail_requests.add(request.request_id)

    @rule()
    def reset_prefix_cache(self):
        self.harness.kv.reset_prefix_cache()

    @invariant()
    def whole(self):
        if hasattr(self, "harness"):
            self.harness.check()
            scheduler = self.harness.scheduler
            order = [int(r.request_id[1:]) for r in [*scheduler.running, *scheduler.waiting]]
            assert order == sorted(order)

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.check()
            assert all(request.status is RequestStatus.FINISHED for request in self.added)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=300,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def run_in_smallest_pools(setup, num_prompt, max_tokens, max_drafts, accuracy):
    """A lone request, in the smallest pools that ``add`` doesn't refuse, runs to its end."""
    max_model_len = setup.options.max_model_len
    prompt = BASES[0][: min(num_prompt, max_model_len - 1)]
    sizes = [1] * len(setup.groups)
    while True:
        setup.num_blocks = tuple(sizes)
        harness = Harness(setup, accuracy=accuracy)
        request = make_request("r", prompt, max_tokens, max_drafts, max_model_len)
        try:
            harness.add(request)
            break
        except ValueError as error:  # it names the first group that is too small
            sizes[int(re.search(r"in group (\d+) ", str(error)).group(1))] += 1
    for _ in range(2):  # the second time over whatever the cache has kept
        harness.drain()
        assert request.output_token_ids == harness.expected(request)
        assert request.num_preemptions == 0
        request = make_request("r", prompt, max_tokens, max_drafts, max_model_len)
        harness.add(request)
    harness.drain()


@settings(max_examples=200, deadline=None)
@given(
    setup=setups(),
    num_prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 30),
    max_drafts=st.sampled_from((0, 1, 4)),
    accuracy=st.sampled_from((0, 0.5, 1)),
)
def test_a_lone_request_runs_in_the_smallest_pools_that_take_it(
    setup, num_prompt, max_tokens, max_drafts, accuracy
):
    run_in_smallest_pools(setup, num_prompt, max_tokens, max_drafts, accuracy)


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_a_lone_request_runs_in_the_smallest_sliding_pools(block_size, window, budget):
    for max_drafts in (1, 4):
        options = SchedulerOptions(1, budget, 64)
        groups = (group("target", window), group("draft", window))
        setup = Setup(groups, (), block_size, False, options)
        run_in_smallest_pools(setup, 13, 25, max_drafts, accuracy=1)


@pytest.mark.parametrize("num_prompt", range(1, 20))
def test_rejecting_everything_across_a_window_and_a_block_edge(num_prompt):
    """Blocks are freed by committed length: after a wholly rejected span, the window of the next
    token starts where the span's second token's did, not where its last token's did."""
    options = SchedulerOptions(1, 64, 64)
    groups = (group("target"), group("target", 6), group("draft", 6))
    harness = Harness(Setup(groups, (20, 20, 20), 4, True, options), accuracy=0)
    harness.add(make_request("r", BASES[0][:num_prompt], 30, max_drafts=5))
    crossings = 0
    while harness.scheduler.has_unfinished_requests():
        ((request, verdict),) = harness.step()
        (work,) = harness.plans[-1].work
        assert verdict.num_accepted == 0
        last = work.start + work.num_tokens - 1
        if request.status is RequestStatus.FINISHED or not work.drafts:
            continue
        table = harness.kv.tables(request)[1]
        assert table.first == max(work.start + 1 - 5, 0) // 4
        crossings += max(last + 1 - 5, 0) // 4 > table.first and last // 4 > work.start // 4
    assert crossings > 0


def test_outputs_are_the_same_alone_and_together():
    setup = Setup(
        (group("target"), group("target", 7), group("draft")),
        (24, 16, 24),
        4,
        True,
        SchedulerOptions(6, 12, 48),
    )
    harness = Harness(setup)
    requests = [
        make_request(f"r{i}", BASES[i % 3][: 3 + 4 * i], 10, (0, 2, 4)[i % 3], 48) for i in range(9)
    ]
    for request in requests:
        harness.add(request)
    harness.drain()
    assert harness.scheduler.num_preemptions > 0  # the pools are too small for all
    assert harness.kv.num_hit_tokens > 0
    for request in requests:
        assert request.output_token_ids == greedy(request.prompt_token_ids, 10)


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("reach", [(None, None), (7, None), (None, 8)])
def test_a_block_is_shared_only_under_the_next_token_that_its_kv_follows_from(block_size, reach):
    """Two prompts equal up to a block edge, different after it."""
    groups = (group("target"), group("draft", *reach, needs_next_token=True))
    options = SchedulerOptions(1, 64, 64)
    common = BASES[0][:12]
    for first, second, hit in ((0, 1, 12 - block_size), (0, 0, 12)):
        harness = Harness(Setup(groups, (64, 64), block_size, True, options))
        for name, token in (("a", first), ("b", second)):
            request = make_request(name, [*common, token], 8, max_drafts=3)
            harness.add(request)
            harness.drain()
        assert request.num_cached_tokens == hit
