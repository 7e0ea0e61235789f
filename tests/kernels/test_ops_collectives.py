"""Collectives: every rank has the bits of one sum in rank order, and of one gathering."""

import numpy as np
import pytest
import torch
from bits import random, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import compiled
from in_memory import InMemoryTensor
from ranks import native_ranks, on_ranks, reference_ranks

from eyas.ops.base import Ops
from eyas.parallel import Share, split_units


def ops_of_ranks(kind: str, size: int, num_threads: int) -> list[Ops]:
    return [*(native_ranks(size, num_threads) if kind == "native" else reference_ranks(size))]


@pytest.mark.parametrize("kind", ["native", "reference"])
@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 4),
    num_threads=st.integers(1, 3),
    num_rows=st.sampled_from([1, 2, 5, 300]),
    width=st.sampled_from([1, 7, 64, 1000]),
    seed=st.integers(0, 99),
)
def test_sums_and_gatherings(
    kind: str, size: int, num_threads: int, num_rows: int, width: int, seed: int
) -> None:
    width = max(width, size)
    values = [random(num_rows, width, seed=4 * seed + rank) for rank in range(size)]
    total = values[0].clone()
    for other in values[1:]:
        total += other
    shares = split_units(width, size)
    assert shares is not None
    ranks = ops_of_ranks(kind, size, num_threads)

    def work(rank: int) -> list[torch.Tensor]:
        ops = ranks[rank]
        # Several in a row: slots are used again.
        add = compiled(ops, lambda x: ops.add(ops.all_reduce(x), ops.all_reduce(x)))
        own = shares[rank]
        gather = compiled(ops, lambda x: ops.add(ops.all_gather(x, shares), total_of(ops, x)))

        def total_of(ops: Ops, x: torch.Tensor) -> torch.Tensor:
            return ops.all_gather(x, shares)

        part = values[0][:, own.start : own.stop].contiguous()
        return [add(values[rank]), gather(part), add(values[rank])]

    for sums, gathered, again in on_ranks(size, work):
        assert same_bits(sums, total + total)
        assert same_bits(gathered, values[0] + values[0])
        assert same_bits(again, sums)


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_a_table_gives_zeros_for_other_ranks_rows(kind: str) -> None:
    (ops,) = ops_of_ranks(kind, 1, 1)
    table = random(5, 32)
    handle = ops.pack_embedding(InMemoryTensor(table))
    ids = np.array([9, 10, 12, 14, 15, 0])
    rows = compiled(ops, lambda ids: ops.embed(handle, ids, 10))(ids)
    nothing = torch.zeros(32)
    assert same_bits(rows, torch.stack([nothing, table[0], table[2], table[4], nothing, nothing]))


def test_single_ops_exchange_nothing() -> None:
    ranks = native_ranks(2)
    x = random(3, 8)
    for ops in ranks:  # one after the other: they can't meet
        single = ops.single()
        whole = compiled(ops, lambda x, ops=single: ops.add(ops.all_reduce(x), x))
        assert same_bits(whole(x), x + x)
        assert same_bits(
            compiled(ops, lambda x, ops=single: ops.add(ops.all_gather(x, [Share(0, 8)]), x))(x),
            x + x,
        )
