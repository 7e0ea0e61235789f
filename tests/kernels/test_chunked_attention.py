"""Chunked local attention through the ops, over virtual batches: a dense masked softmax's values,
and bits that depend on nothing but the chunk."""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    Case,
    Request,
    check_row_independence,
    check_values,
    pieces,
    request,
    run,
)
from bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import FLOAT, REFERENCE, THREADS, Family

from eyas.ops.base import AttentionShape

NAMES = {"ids": lambda value: getattr(value, "name", None)}
SHAPE = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=8, window=None)


@st.composite
def chunked_cases(draw: st.DrawFn, max_position: int) -> Case:
    """Prefill chunks, verify spans and decodes; many begin or end at a chunk's or block's edge."""
    block_size = draw(st.sampled_from([1, 3, 8, 16, 64]))
    chunk = block_size * draw(st.integers(1, 5) | st.integers(6, 40))
    kv_heads = draw(st.integers(1, 2))
    shape = AttentionShape(
        num_query_heads=kv_heads * draw(st.sampled_from([1, 3])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 24])),
        window=None,
    )
    requests = []
    for seed in range(draw(st.integers(1, 3))):
        unit = draw(st.sampled_from([chunk, block_size]))
        edge = draw(st.integers(0, max(max_position // unit, 1))) * unit
        position = max(0, edge + draw(st.sampled_from([-3, -1, 0, 0, 1])))
        num_queries = draw(st.integers(1, 8) | st.integers(1, 60) | st.just(chunk))
        requests.append(request(shape, position + num_queries, num_queries, seed))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return Case(shape, block_size, dtype, tuple(requests), chunk)


@pytest.mark.parametrize("family", FLOAT, **NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=chunked_cases(max_position=300),
    sizes=st.lists(st.integers(1, 3) | st.integers(1, 40), min_size=1, max_size=4),
)
def test_values_and_rows(family: Family, case: Case, sizes: list[int]) -> None:
    check_values(family.at(2), case)
    check_row_independence(family, case, sizes)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    case=chunked_cases(max_position=60), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3)
)
def test_reference_values_and_rows(case: Case, sizes: list[int]) -> None:
    check_values(REFERENCE.at(1), case)
    check_row_independence(REFERENCE, case, sizes)


@pytest.mark.parametrize("family", [REFERENCE, *FLOAT], **NAMES)
def test_a_chunk_has_the_bits_of_a_sequence_of_its_own(family: Family) -> None:
    """Key tiles begin at the chunk's start, whatever stands before it, and wherever it stands."""
    whole = request(SHAPE, 230, 230, seed=0)
    for chunk, block_size in ((80, 16), (72, 8), (1, 1), (96, 96), (240, 8)):
        ops = family.at(THREADS[chunk % 3])
        case = Case(SHAPE, block_size, torch.float16, (whole,), chunk)
        parts = [
            Request(*(part[start : start + chunk] for part in (whole.q, whole.k, whole.v)), count)
            for start in range(0, 230, chunk)
            for count in [min(chunk, 230 - start)]
        ]
        alone = run(ops, replace(case, requests=tuple(parts), chunk=None))
        assert same_bits(run(ops, case)[0], torch.cat(alone))
        for sizes in ([1], [5, 7], [chunk], [chunk + 1]):  # decoding, verify spans, prefill chunks
            split = replace(case, requests=tuple(pieces(whole, sizes)))
            assert same_bits(torch.cat(run(ops, split, seed=1)), torch.cat(alone))
