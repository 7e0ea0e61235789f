"""Comparing bits, and running with a given number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal float32 tensors, NaN equal to the same NaN and 0 not equal to -0."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
