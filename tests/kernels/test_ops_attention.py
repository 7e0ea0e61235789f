"""Attention: its values, and that a row's bits depend on its own request alone."""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    BLOCK_SIZES,
    HEAD_DIMS,
    Case,
    cases,
    check_row_independence,
    check_values,
    request,
    run,
)
from bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import FLOAT, REFERENCE, THREADS, Family

from eyas.ops.base import AttentionShape

NAMES = {"ids": lambda value: getattr(value, "name", None)}


@pytest.mark.parametrize("family", FLOAT, **NAMES)
@settings(max_examples=80, derandomize=True)
@given(
    case=cases(max_queries=70, max_position=400),
    sizes=st.lists(st.integers(1, 3) | st.integers(1, 40), min_size=1, max_size=4),
)
def test_rows_ignore_their_neighbours(family: Family, case: Case, sizes: list[int]) -> None:
    check_row_independence(family, case, sizes)


@settings(max_examples=8, derandomize=True)
@given(
    case=cases(max_queries=8, max_position=100),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
def test_reference_rows_ignore_their_neighbours(case: Case, sizes: list[int]) -> None:
    check_row_independence(REFERENCE, case, sizes)


@pytest.mark.parametrize("family", FLOAT, **NAMES)
@settings(max_examples=80, derandomize=True)
@given(case=cases(max_queries=70, max_position=400), count=st.sampled_from(THREADS))
def test_values(family: Family, case: Case, count: int) -> None:
    check_values(family.at(count), case)


@settings(max_examples=10, derandomize=True)
@given(case=cases(max_queries=10, max_position=130))
def test_reference_values(case: Case) -> None:
    check_values(REFERENCE.at(1), case)


@pytest.mark.parametrize("family", FLOAT, **NAMES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_block_size_and_window(family: Family, head_dim: int) -> None:
    """The block size decides nothing; a window that sees everything decides nothing."""
    shape = AttentionShape(num_query_heads=6, num_kv_heads=2, head_dim=head_dim, window=None)
    for window in (None, 1, 16, 100, 1000):
        shaped = replace(shape, window=window)
        requests = (request(shape, 300, 40, seed=0), request(shape, 129, 1, seed=1))
        case = Case(shaped, 16, torch.float16, requests)
        expected = run(family.at(1), case)
        if window == 1000:
            unlimited = run(family.at(1), replace(case, shape=shape))
            assert all(same_bits(*pair) for pair in zip(unlimited, expected, strict=True))
        for count, size in enumerate(BLOCK_SIZES):
            ops = family.at(THREADS[count % len(THREADS)])
            actual = run(ops, replace(case, block_size=size), seed=count)
            assert all(same_bits(*pair) for pair in zip(actual, expected, strict=True)), size
        check_values(family.at(3), case)


@pytest.mark.parametrize("family", FLOAT, **NAMES)
@pytest.mark.parametrize("num_heads", [31, 32, 33, 40, 71])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_many_query_heads_of_one_kv_head(family: Family, num_heads: int, head_dim: int) -> None:
    shape = AttentionShape(num_heads, 1, head_dim, None)
    case = Case(
        shape, 16, torch.bfloat16, (request(shape, 270, 3, seed=0), request(shape, 70, 1, seed=1))
    )
    check_row_independence(family, case, [1, 2])
    check_values(family.at(2), case)


@pytest.mark.parametrize("family", FLOAT, **NAMES)
def test_long_contexts_are_split_over_threads_without_a_trace(family: Family) -> None:
    """One token each of a few requests, whose contexts end around the edges of key spans."""
    shape = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=64, window=None)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        requests = [request(shape, length, 1, seed=length) for length in (1, 128, 129, 1100)]
        expected = run(family.at(1), Case(shape, 16, dtype, tuple(requests)))
        for count in THREADS:
            for one, wanted in zip(requests, expected, strict=True):
                alone = Case(shape, 16, dtype, (one,))
                assert same_bits(run(family.at(count), alone)[0], wanted)
                check_values(family.at(count), alone)
