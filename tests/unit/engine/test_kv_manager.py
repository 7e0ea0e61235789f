"""KVManager: prefix hits counted by hand, lifetimes per group, and the block bound."""

import pytest

from eyas.engine.kv_manager import KVManager, hash_block
from eyas.engine.request import Request
from eyas.kv_spec import KVGroupSpec
from eyas.sampling.rules import SamplingRules


def group(owner, window=None, chunk=None, needs_next_token=False):
    return KVGroupSpec(owner, 1, 1, 1, window, chunk, needs_next_token)


def make_request(name, tokens, max_drafts=0, prompt_logprobs=None):
    rules = SamplingRules(prompt_logprobs=prompt_logprobs)
    return Request(name, tuple(tokens), None, rules, 0, 0, 99, max_drafts)


def make_kv(*groups, num_blocks=20, block_size=4, caching=True):
    return KVManager(groups, (num_blocks,) * len(groups), block_size, caching)


def prefill(kv, request, draft_length=None, others=()):
    """Runs the whole prompt in one step, then commits."""
    hit = kv.find_hit(request)
    assert kv.admit(request, hit, request.num_tokens, request.num_tokens)
    request.num_computed = request.num_tokens
    kv.commit(request, request.num_tokens if draft_length is None else draft_length)
    kv.check_integrity([request, *others])
    return hit


TARGET = group("target")
DRAFT = group("draft")


@pytest.mark.parametrize(
    ("tokens", "hit"),
    [
        (range(12), 8),  # one token must be left to compute
        (range(13), 12),
        (range(30), 12),
        ([*range(8), 99, 98], 8),  # equal up to a block edge
        ([*range(7), 99, 98], 4),
        ([99, *range(1, 12)], 0),
        (range(4, 12), 0),  # the same blocks, but other tokens before them
        (range(4), 0),
        (range(5), 4),
    ],
)
def test_hit_is_the_longest_prefix_of_full_blocks(tokens, hit):
    kv = make_kv(TARGET)
    first = make_request("a", range(14))  # three full blocks and a half
    prefill(kv, first)
    second = make_request("b", tokens)
    assert kv.find_hit(second) == hit
    assert kv.admit(second, hit, second.num_tokens, 0)
    (table,), (of_first,) = kv.tables(second), kv.tables(first)
    assert table.blocks[: hit // 4] == of_first.blocks[: hit // 4]
    assert not set(table.blocks[hit // 4 :]) & set(of_first.blocks)
    second.num_computed = hit
    kv.check_integrity([first, second])
    kv.free(first)
    kv.free(second)
    kv.check_integrity([])
    assert kv.num_used_blocks() == (0,)
    assert (kv.num_hit_tokens, kv.num_queried_tokens) == (hit, 14 + len(tokens))


def test_nothing_is_found_without_caching_or_with_prompt_logprobs():
    kv = make_kv(TARGET, caching=False)
    prefill(kv, make_request("a", range(14)))
    assert kv.find_hit(make_request("b", range(14))) == 0
    kv = make_kv(TARGET)
    prefill(kv, make_request("a", range(14)))
    assert kv.find_hit(make_request("b", range(14), prompt_logprobs=0)) == 0
    assert kv.find_hit(make_request("b", range(14))) == 12
    kv.reset_prefix_cache()
    assert kv.find_hit(make_request("b", range(14))) == 0


def test_a_block_is_published_only_when_its_last_token_is_committed():
    kv = make_kv(TARGET)
    first = make_request("a", range(8))
    assert kv.admit(first, 0, 8, 0)
    for computed, hit in ((3, 0), (4, 4), (7, 4), (8, 8)):
        first.num_computed = computed
        kv.commit(first, 0)
        assert kv.find_hit(make_request("b", range(20))) == hit


def test_output_tokens_are_found_too():
    kv = make_kv(TARGET)
    first = make_request("a", range(3))
    first.output_token_ids += [3, 4, 5, 6, 7]
    prefill(kv, first)
    kv.free(first)
    assert kv.find_hit(make_request("b", range(9))) == 8


def test_a_hit_falls_back_to_what_the_draft_group_has():
    kv = make_kv(TARGET, DRAFT)
    prefill(kv, make_request("a", range(13), max_drafts=2), draft_length=7)
    assert kv.find_hit(make_request("b", range(13), max_drafts=2)) == 4
    assert kv.find_hit(make_request("c", range(13))) == 12


def test_a_request_without_speculation_holds_no_draft_blocks():
    kv = make_kv(TARGET, DRAFT)
    plain = make_request("a", range(13))
    prefill(kv, plain)
    assert kv.tables(plain)[1].blocks == ()
    assert kv.num_used_blocks() == (4, 0)
    assert kv.find_hit(make_request("b", range(13), max_drafts=1)) == 0


def test_a_duplicate_keeps_its_own_block_unpublished():
    kv = make_kv(TARGET, DRAFT)
    plain = make_request("a", range(9))
    prefill(kv, plain)
    speculating = make_request("b", range(9), max_drafts=1)
    assert prefill(kv, speculating, others=[plain]) == 0  # no draft blocks to be found
    target_a, target_b = kv.tables(plain)[0], kv.tables(speculating)[0]
    assert not set(target_a.blocks) & set(target_b.blocks)
    third = make_request("c", range(9), max_drafts=1)
    assert kv.find_hit(third) == 8
    assert kv.admit(third, 8, 9, 9)
    assert kv.tables(third)[0].blocks[:2] == target_a.blocks[:2]


def test_a_window_needs_only_its_last_tokens():
    kv = make_kv(group("target", 6), num_blocks=5)
    first = make_request("a", range(17))
    prefill(kv, first)  # 17 committed: position 12 is the first that position 17 sees
    assert kv.tables(first)[0].first == 3
    assert kv.num_used_blocks() == (2,)
    second = make_request("b", range(17))
    assert kv.find_hit(second) == 16
    assert kv.admit(second, 16, 17, 0)
    table = kv.tables(second)[0]
    assert table.first == 2  # position 11 is the first that position 16 sees
    assert table.blocks[1] == kv.tables(first)[0].blocks[0]
    second.num_computed = 16
    kv.check_integrity([first, second])
    kv.free(first)
    kv.free(second)
    # Blocks 0 and 1 are taken for others: 16 tokens are still a hit, 8 are not.
    other = make_request("c", range(100, 108))
    prefill(kv, other)
    prefill(kv, make_request("d", range(200, 204)), others=[other])
    assert kv.find_hit(make_request("e", range(17))) == 16
    assert kv.find_hit(make_request("f", range(12))) == 0


def test_windows_of_two_groups_must_agree():
    """Shortening for the second group moves the first one's window onto a block that it lacks."""
    kv = make_kv(group("target", 5), group("target", 5))
    request = make_request("a", range(17))
    prefill(kv, request)
    first, second = kv.pools
    assert kv.find_hit(request) == 16
    # Each length h needs exactly block h - 1. Group 0 lacks block 2, group 1 lacks block 3.
    for pool, index in ((first, 2), (second, 3)):
        pool._unpublish(pool.find(request.block_hashes[index]))
    assert kv.find_hit(request) == 8


def test_admit_and_extend_are_all_or_nothing():
    kv = KVManager((TARGET, DRAFT), (4, 2), 4, True)
    request = make_request("a", range(9), max_drafts=1)
    assert not kv.admit(request, 0, 9, 9)  # the draft's pool has 2 blocks
    kv.check_integrity([request])
    assert kv.num_used_blocks() == (0, 0)
    short = make_request("b", range(8), max_drafts=1)
    assert kv.admit(short, 0, 8, 8)
    assert not kv.extend(short, 9, 9)
    assert kv.num_used_blocks() == (2, 2)
    kv.check_integrity([short])
    assert kv.extend(short, 12, 8)
    assert kv.num_used_blocks() == (3, 2)


def test_a_prompt_waits_until_all_of_it_fits():
    kv = make_kv(TARGET, num_blocks=4)
    assert not kv.admit(make_request("a", range(17)), 0, 4, 0)
    assert kv.admit(make_request("b", range(16)), 0, 4, 0)
    assert kv.num_used_blocks() == (1,)


def test_hit_blocks_that_are_free_count_as_blocks_to_take():
    kv = make_kv(TARGET, num_blocks=4)
    first = make_request("a", range(9))
    prefill(kv, first)
    kv.free(first)
    other = make_request("b", range(100, 106))
    prefill(kv, other)  # takes two: one never used, and the first's unpublished tail
    again = make_request("c", range(9))
    assert kv.find_hit(again) == 8
    assert not kv.admit(again, 8, 9, 0)  # two hit blocks and one more, but two are free
    kv.check_integrity([other, again])
    kv.free(other)
    assert kv.admit(again, 8, 9, 0)


def test_freed_tails_are_taken_before_heads():
    kv = make_kv(TARGET, num_blocks=4)
    first = make_request("a", range(16))
    prefill(kv, first)
    kv.free(first)
    for num_blocks, hit in ((1, 12), (2, 8)):
        other = make_request("b", range(100, 100 + 4 * num_blocks - 1))
        assert kv.admit(other, 0, other.num_tokens, 0)
        assert kv.find_hit(make_request("c", range(20))) == hit
        kv.free(other)


def test_tables_are_cached_until_they_change():
    kv = make_kv(group("target", 4))
    request = make_request("a", range(20))
    assert kv.admit(request, 0, 5, 0)
    before = kv.tables(request)[0]
    assert kv.extend(request, 8, 0)
    assert kv.tables(request)[0] is before
    assert kv.extend(request, 9, 0)
    assert kv.tables(request)[0].blocks[:2] == before.blocks
    request.num_computed = 9
    kv.commit(request, 0)
    assert kv.tables(request)[0].first == 1  # position 6 is the first that position 9 sees


def test_draft_kv_that_shrinks_is_a_bug():
    kv = make_kv(TARGET, DRAFT)
    request = make_request("a", range(9), max_drafts=1)
    prefill(kv, request)
    with pytest.raises(AssertionError, match="draft KV went from 9 positions to 5"):
        kv.commit(request, 5)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 17])
@pytest.mark.parametrize("step", [1, 2, 7, 16])
def test_max_blocks_is_the_brute_force_maximum(block_size, window, step):
    kv = make_kv(group("target", window), block_size=block_size)
    length = 120
    brute = 0
    for committed in range(length):
        seen = range(0 if window is None else max(0, committed - window + 1), committed)
        touched = [*seen, *range(committed, min(committed + step, length))]
        brute = max(brute, len({position // block_size for position in touched}))
    assert kv.max_blocks(kv.groups[0], length, step) == brute


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("blocks_in_chunk", [1, 2, 5, 50])
@pytest.mark.parametrize("step", [1, 2, 7, 16, 40])
def test_max_blocks_of_a_chunk_is_the_brute_force_maximum(block_size, blocks_in_chunk, step):
    chunk = blocks_in_chunk * block_size
    kv = make_kv(group("target", chunk=chunk), block_size=block_size)
    length = 360
    brute = 0
    for committed in range(length):
        last = min(committed + step, length) - 1
        touched = [j for j in range(last + 1) if j // chunk >= committed // chunk]
        brute = max(brute, len({position // block_size for position in touched}))
    assert kv.max_blocks(kv.groups[0], length, step) == brute
    # No more than one chunk and the step in flight.
    assert brute * block_size < chunk - 1 + step + block_size


def test_block_hashes_tell_parents_and_tokens_apart():
    root = hash_block(b"", (1, 2))
    hashes = {root, hash_block(b"", (2, 1)), hash_block(root, (1, 2)), hash_block(b"", (1, 2, 0))}
    assert len(hashes) == 4
    assert hash_block(b"", (1, 2)) == root
    assert hash_block(b"", (258,)) != hash_block(b"", (2, 1))
