"""Shard rules: every rank's part, for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.parallel import HeadShare, Share, split_heads, split_threads, split_units

sizes = st.integers(1, 9)


def assert_covers(shares: list[Share], count: int) -> None:
    assert all(share.size > 0 for share in shares)
    assert [item for share in shares for item in range(share.start, share.stop)] == list(
        range(count)
    )


@given(st.integers(1, 5000), sizes, st.sampled_from([1, 16, 32, 256]))
def test_units_are_shared_whole_and_evenly(count: int, size: int, unit: int) -> None:
    shares = split_units(count, size, unit)
    num_units = -(-count // unit)
    if shares is None:
        assert num_units < size
        return
    assert len(shares) == size
    assert_covers(list(shares), count)
    assert all(share.stop % unit == 0 for share in shares[:-1])
    held = [-(-share.size // unit) for share in shares]
    assert max(held) - min(held) <= 1
    assert held == sorted(held, reverse=True)


@given(st.integers(1, 12), st.integers(1, 8), sizes)
def test_heads_are_shared_with_the_kv_heads_that_they_read(
    num_kv: int, ratio: int, size: int
) -> None:
    num_query = num_kv * ratio
    if size > num_query:
        with pytest.raises(ValueError, match=f"{size} is more than the model's {num_query}"):
            split_heads(num_query, num_kv, size)
        return
    shares = split_heads(num_query, num_kv, size)
    assert len(shares) == size
    assert_covers([share.query for share in shares], num_query)
    for share in shares:
        heads = range(share.query.start, share.query.stop)
        read = {head // ratio for head in heads}
        assert read == set(range(share.kv.start, share.kv.stop))
        # The kernels take it that as many query heads read each KV head.
        per_kv = share.query.size // share.kv.size
        assert all(
            head // ratio - share.kv.start == (head - share.query.start) // per_kv for head in heads
        )
    most = max(share.query.size for share in shares)
    if size <= num_kv:
        assert_covers([share.kv for share in shares], num_kv)
        assert most == -(-num_kv // size) * ratio
    else:
        assert {share.kv.size for share in shares} == {1}
        ranks = [sum(share.kv.start == head for share in shares) for head in range(num_kv)]
        assert max(ranks) - min(ranks) <= 1


def test_the_demo_models_heads() -> None:
    def heads(size: int) -> list[tuple[int, int]]:
        return [(share.query.size, share.kv.size) for share in split_heads(9, 3, size)]

    assert heads(1) == [(9, 3)]
    assert heads(2) == [(6, 2), (3, 1)]
    assert heads(3) == [(3, 1)] * 3
    assert heads(4) == [(2, 1), (1, 1), (3, 1), (3, 1)]
    assert split_heads(9, 3, 4)[1] == HeadShare(Share(2, 3), Share(0, 1))


@given(st.integers(1, 64), sizes)
def test_threads_are_shared_out_and_everybody_has_one(num_threads: int, size: int) -> None:
    shares = split_threads(num_threads, size)
    assert len(shares) == size
    assert min(shares) >= 1
    assert sum(shares) == max(num_threads, size)
