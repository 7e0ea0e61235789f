"""Comparing bits, and inputs to compare them for."""

import torch


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal float32 tensors, NaN equal to the same NaN and 0 not equal to -0."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed float32 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def at_offset(x: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of ``x`` that starts ``offset`` floats into its memory."""
    return torch.cat([torch.zeros(offset), x.reshape(-1)])[offset:].view(x.shape)
