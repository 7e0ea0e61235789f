"""Chunked local attention (Llama 4) over any backend that can do causal attention.

A token sees its chunk: the C positions from a multiple of C on. So a request's queries are cut at
the multiples of C, and each piece becomes a virtual request of its own, whose positions count from
its chunk's start: what it sees is then an ordinary causal mask over the chunk's blocks.
"""

from collections.abc import Sequence

from eyas.ops.base import AttentionSpan


def split_at_chunks(
    spans: Sequence[AttentionSpan], chunk: int, block_size: int
) -> list[AttentionSpan]:
    """One span per span and chunk that it touches, in row order. ``block_size`` divides ``chunk``,
    and each span has the blocks of its first query's chunk and all later ones."""
    assert chunk % block_size == 0, f"chunks of {chunk} positions in blocks of {block_size}"
    pieces = []
    for span in spans:
        done = 0
        while done < span.num_queries:
            position = span.position + done
            start = position // chunk * chunk
            count = min(start + chunk - position, span.num_queries - done)
            first = start // block_size - span.first_block
            end = -(-(position + count) // block_size) - span.first_block
            assert 0 <= first < end <= len(span.blocks), f"chunk {start}.. is not held by {span}"
            pieces.append(
                AttentionSpan(
                    row=span.row + done,
                    num_queries=count,
                    position=position - start,
                    first_block=0,
                    blocks=span.blocks[first:end],
                )
            )
            done += count
    return pieces
