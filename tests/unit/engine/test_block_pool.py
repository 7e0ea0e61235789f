"""BlockPool: holders, the order in which blocks are taken again, and content look-up."""

import pytest

from eyas.engine.block_pool import BlockPool


def test_every_block_is_taken_once_and_comes_back():
    pool = BlockPool(3)
    assert sorted(pool.take(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="took 1 blocks of 0"):
        pool.take(1)
    pool.release([0, 1, 2])
    assert pool.num_free == 3
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([1])


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    pool.share(block)
    pool.release([block])
    assert not pool.is_free(block)
    pool.check_integrity([[block]])
    pool.release([block])
    assert pool.is_free(block)
    pool.check_integrity([])


def test_free_published_blocks_are_found_until_they_are_taken_oldest_first():
    pool = BlockPool(3)
    a, b, c = pool.take(3)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([b, a, c])
    assert pool.find(b"a") == a
    assert pool.find(b"b") == b
    assert pool.take(1) == [c]  # nothing is lost by taking it
    assert pool.take(1) == [b]
    assert pool.find(b"b") is None
    pool.share(a)  # a hit takes it off the free list
    assert pool.num_free == 0
    pool.check_integrity([[a], [b], [c]])


def test_the_first_of_two_blocks_with_one_content_stays_published():
    pool = BlockPool(2)
    a, b = pool.take(2)
    pool.publish(a, b"same")
    pool.publish(b, b"same")
    assert pool.find(b"same") == a
    assert pool.hash_of(b) is None
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(a, b"other")


def test_private_blocks_are_not_shared_and_free_ones_not_published():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="not published"):
        pool.share(block)
    pool.release([block])
    with pytest.raises(AssertionError, match="published but free"):
        pool.publish(block, b"x")


def test_unpublish_all_leaves_holders_alone():
    pool = BlockPool(2)
    a, b = pool.take(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.release([b])
    pool.unpublish_all()
    assert pool.find(b"a") is None
    assert pool.find(b"b") is None
    pool.check_integrity([[a]])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "1 holders recorded, 0 found"),
        ([[0], [0]], "1 holders recorded, 2 found"),
        ([[0, 0]], "holds a block twice"),
        ([[0, 1]], "block 1: 0 holders recorded, 1 found"),
    ],
)
def test_integrity_check_sees_lost_and_doubly_owned_blocks(tables, message):
    pool = BlockPool(2)
    assert pool.take(1) == [0]
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(tables)
