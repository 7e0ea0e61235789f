"""Block numbers: enough for one request by the scheduler's own rule, and in the budget."""

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eyas.engine.kv_manager import KVManager
from eyas.engine.kv_sizing import KVDemand, size_kv
from eyas.engine.request import Request
from eyas.engine.scheduler import Scheduler, SchedulerOptions
from eyas.kv_spec import KVGroupSpec
from eyas.sampling.params import SamplingParams
from eyas.sampling.rules import SamplingRules

FULL = KVGroupSpec("target", num_layers=2, num_kv_heads=3, head_dim=4)
SLIDING = KVGroupSpec("target", num_layers=5, num_kv_heads=3, head_dim=4, window=32)
DRAFT = KVGroupSpec("draft", num_layers=1, num_kv_heads=3, head_dim=4)
LIMITS = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1000)


def demand(*groups, limits=LIMITS, block_size=16, max_drafts=0):
    return KVDemand(groups, 4, block_size, limits, max_drafts)


def num_bytes(counts, groups, block_size=16, element_size=4):
    """2 (keys and values) x layers x heads x size x bytes x tokens."""
    return sum(
        count * block_size * 2 * g.num_layers * g.num_kv_heads * g.head_dim * element_size
        for count, g in zip(counts, groups, strict=True)
    )


def plenty():
    return 10**12


def test_the_default_is_what_the_most_requests_need():
    # 1000 tokens are 63 blocks of 16. A window of 32 (and the token in work) touches 3 at most;
    # one request's worst step is 31 + 64 tokens on 7 blocks.
    assert size_kv(demand(FULL), None, plenty) == (4 * 63,)
    assert size_kv(demand(FULL, SLIDING), None, plenty) == (4 * 63, 7 + 3 * 3)


def test_the_default_is_at_most_40_percent_of_what_is_free():
    groups = (FULL, SLIDING)
    for free in (700_000, 1_234_567, 2_000_000):
        counts = size_kv(demand(*groups), None, lambda free=free: free)
        assert num_bytes(counts, groups) <= 0.4 * free
        assert num_bytes((counts[0] + 1, counts[1] + 1), groups) > 0.4 * free
        assert 63 <= counts[0] < 4 * 63


def test_given_memory_is_used_up_and_nobody_asks_what_is_free():
    def unasked():
        raise AssertionError

    per_block = num_bytes((1,), (FULL,))
    assert size_kv(demand(FULL), 1000 * per_block + 5, unasked) == (1000,)


def test_too_little_memory():
    per_block = num_bytes((1,), (FULL,))
    with pytest.raises(ValueError, match="max_model_len=1000") as error:
        size_kv(demand(FULL), 20 * per_block)
    text = str(error.value)
    assert f"takes {63 * per_block} bytes" in text
    assert f"kv_cache_memory is {20 * per_block} bytes" in text
    assert "lower max_model_len to 320, or set kv_cache_memory to more" in text
    with pytest.raises(ValueError, match="40 % of the free memory is 40 bytes: set kv_cache"):
        size_kv(demand(FULL), None, lambda: 100)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=1, max_size=3),
    draft_windows=st.lists(st.one_of(st.none(), st.integers(1, 60)), max_size=2),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 80),
    max_model_len=st.integers(2, 120),
    block_size=st.integers(1, 20),
    max_drafts=st.integers(0, 6),
    budget=st.one_of(st.none(), st.integers(0, 300_000)),  # None: the least that is accepted
)
def test_what_is_sized_runs(
    windows, draft_windows, max_num_seqs, max_num_batched_tokens, max_model_len, block_size,
    max_drafts, budget,
):  # fmt: skip
    groups = tuple(KVGroupSpec("target", 1, 1, 4, window) for window in windows)
    groups += tuple(KVGroupSpec("draft", 1, 1, 4, window) for window in draft_windows)
    limits = SchedulerOptions(max_num_seqs, max_num_batched_tokens, max_model_len)
    wanted = KVDemand(groups, 4, block_size, limits, max_drafts)
    if budget is None:
        budget = wanted.num_bytes(wanted.full_blocks())
    try:
        counts = size_kv(wanted, budget)
    except ValueError:
        # Right to refuse: the fewest blocks that the scheduler accepts don't fit either.
        fewest = [
            KVManager(groups, (0,) * len(groups), block_size, False).max_blocks(
                group, max_model_len, min(max_num_batched_tokens, max_model_len) + max_drafts
            )
            for group in groups
        ]
        assert num_bytes(fewest, groups, block_size) > budget
        return
    assert num_bytes(counts, groups, block_size) <= budget
    scheduler = Scheduler(limits, KVManager(groups, counts, block_size, True))
    prompt = tuple(range(max_model_len - 1))
    request = Request(
        "r", prompt, SamplingParams(), SamplingRules(), 0, 0, max_model_len, max_drafts
    )
    scheduler.add(request)
    assert scheduler.schedule().work


@given(num_blocks=st.integers(63, 500), window=st.integers(1, 200))
def test_a_larger_budget_never_gives_fewer_blocks(num_blocks, window):
    groups = (FULL, KVGroupSpec("target", 1, 3, 4, window))
    assume(num_blocks > 63)
    budget = num_bytes((num_blocks, num_blocks), groups)
    smaller, larger = (size_kv(demand(*groups), b) for b in (budget, budget + 10_000))
    assert all(a <= b for a, b in zip(smaller, larger, strict=True))
    assert larger[1] <= larger[0]


def test_a_drafts_groups_count_too():
    counts = size_kv(demand(FULL, DRAFT, max_drafts=3), None, plenty)
    assert counts == (4 * 63, 4 * 63)


def test_a_sliding_draft_needs_room_for_its_proposal():
    # Its window's other 31 tokens, a chunk of 64 and 16 drafts: 111 tokens touch 8 blocks at worst.
    draft = KVGroupSpec("draft", 1, 3, 4, window=32)
    limits = dataclasses.replace(LIMITS, max_num_seqs=1)
    assert size_kv(demand(FULL, draft, limits=limits, max_drafts=16), None, plenty) == (63, 8)
