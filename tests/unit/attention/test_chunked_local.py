"""Virtual batches of chunked local attention, against the mask that they stand for."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eyas.attention.chunked_local import split_at_chunks
from eyas.ops.base import AttentionSpan

Slot = tuple[int, int]  # block, offset in it


def make_spans(
    requests: Sequence[tuple[int, int, int]], chunk: int, block_size: int, spare: int = 0
) -> list[AttentionSpan]:
    """Spans of (position, num_queries, number of blocks that are already gone) in consecutive rows.
    No two blocks have the same number; block i of request r is 1000 r + i. There are ``spare``
    blocks after the last one that is needed."""
    spans, row = [], 0
    for r, (position, num_queries, gone) in enumerate(requests):
        first = min(gone, position // chunk * (chunk // block_size))
        end = -(-(position + num_queries) // block_size) + spare
        blocks = tuple(1000 * r + i for i in range(first, end))
        spans.append(AttentionSpan(row, num_queries, position, first, blocks))
        row += num_queries
    return spans


def causal(spans: Sequence[AttentionSpan], block_size: int) -> tuple[dict, dict]:
    """What Ops.attention promises of spans: by row, the slot that it writes, and the slots that it
    sees in order."""
    written: dict[int, Slot] = {}
    seen: dict[int, list[Slot]] = {}
    for span in spans:
        slots = {
            span.first_block * block_size + i: (span.blocks[i // block_size], i % block_size)
            for i in range(len(span.blocks) * block_size)
        }
        for i in range(span.num_queries):
            position, row = span.position + i, span.row + i
            assert row not in written, f"two spans hold row {row}"
            written[row] = slots[position]
            seen[row] = [slots[j] for j in range(position + 1)]
    return written, seen


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int]:
    """A block size, and a chunk that is a multiple of it."""
    block_size = draw(st.integers(1, 8))
    return block_size * draw(st.integers(1, 5)), block_size


requests = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 90) | st.integers(1, 8), st.integers(0, 20)),
    min_size=1,
    max_size=5,
)


@given(shape=shapes(), requests=requests, spare=st.integers(0, 2))
@example(shape=(8, 4), requests=[(6, 4, 0)], spare=0)  # a verify span over a boundary
@example(shape=(4, 2), requests=[(3, 6, 1)], spare=1)  # ... over two
@example(shape=(1, 1), requests=[(5, 3, 9), (0, 1, 0)], spare=0)  # every token its own chunk
@example(shape=(8, 8), requests=[(8, 8, 1), (7, 1, 0), (7, 2, 0), (16, 1, 2)], spare=0)  # edges
def test_each_row_sees_its_chunk(shape, requests, spare) -> None:
    chunk, block_size = shape
    spans = make_spans(requests, chunk, block_size, spare)
    pieces = split_at_chunks(spans, chunk, block_size)
    written, seen = causal(pieces, block_size)
    row = 0
    for r, (position, num_queries, _) in enumerate(requests):
        for i in range(position, position + num_queries):
            # Token i sees j iff j <= i and j // C == i // C.
            mask = [j for j in range(i + 1) if j // chunk == i // chunk]
            expected = [(1000 * r + j // block_size, j % block_size) for j in mask]
            assert seen[row] == expected
            assert written[row] == expected[-1]  # the slot mapping doesn't change
            row += 1
    assert len(seen) == row
    assert sum(piece.num_queries for piece in pieces) == row
    for piece in pieces:  # none has a block that it doesn't need
        assert len(piece.blocks) == -(-(piece.position + piece.num_queries) // block_size)
        assert piece.position + piece.num_queries <= chunk
    rows = [piece.row for piece in pieces]
    assert rows == sorted(rows)


@given(requests=requests, block_size=st.integers(1, 8))
def test_a_chunk_longer_than_the_context_decides_nothing(requests, block_size) -> None:
    chunk = 200 * block_size
    spans = make_spans([(position, count, 0) for position, count, _ in requests], chunk, block_size)
    assert split_at_chunks(spans, chunk, block_size) == spans


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_the_worked_example(block_size: int) -> None:
    """The known example of virtual batches: C = 4, queries [4, 10, 5] that end at [6, 17, 9]."""
    spans = make_spans([(2, 4, 0), (7, 10, 0), (4, 5, 0)], 4, block_size)
    pieces = split_at_chunks(spans, 4, block_size)
    assert [piece.num_queries for piece in pieces] == [2, 2, 1, 4, 4, 1, 4, 1]
    assert [piece.position + piece.num_queries for piece in pieces] == [4, 2, 4, 4, 4, 1, 4, 1]
    starts = [piece.blocks[0] % 1000 * block_size for piece in pieces]
    assert starts == [0, 4, 4, 8, 12, 16, 4, 8]
    assert [piece.row for piece in pieces] == [0, 2, 4, 5, 9, 13, 14, 18]


def test_a_span_without_its_chunk_is_a_bug() -> None:
    with pytest.raises(AssertionError, match=r"chunk 8\.\. is not held"):
        split_at_chunks([AttentionSpan(0, 2, 14, 3, (0,))], 8, 4)
    with pytest.raises(AssertionError, match=r"chunk 16\.\. is not held"):
        split_at_chunks([AttentionSpan(0, 4, 14, 2, (0, 1))], 8, 4)
    with pytest.raises(AssertionError, match="chunks of 6 positions in blocks of 4"):
        split_at_chunks([AttentionSpan(0, 1, 0, 0, (0,))], 6, 4)
