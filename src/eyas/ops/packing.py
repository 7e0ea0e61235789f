"""Reading stored tensors into one packed buffer, a few rows at a time."""

from collections.abc import Sequence

import torch

from eyas.tensors import StoredTensor

_CHUNK_BYTES = 16 << 20  # of float32: small beside any model, large beside a call's overhead

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack_rows(
    weights: Sequence[StoredTensor], dtype: torch.dtype, multiple: int = 1
) -> torch.Tensor:
    """Stack the [N_i, K] ``weights`` along N into one [N, K] tensor, rounded to ``dtype``, with
    rows of zeros up to a multiple of ``multiple``.

    Each tensor's file pages are released once it is read, so that a weight is in memory once.
    Raises ValueError naming a tensor that ``dtype`` can't hold (float16 overflows at 65504).
    """
    assert weights, "nothing to pack"
    (columns,) = {weight.shape[1] for weight in weights}
    rows = max(1, _CHUNK_BYTES // (4 * columns))
    num_rows = sum(weight.shape[0] for weight in weights)
    padding = -num_rows % multiple
    packed = torch.empty(num_rows + padding, columns, dtype=dtype)
    packed[num_rows:] = 0.0
    row = 0
    for weight in weights:
        for start in range(0, weight.shape[0], rows):
            stop = min(start + rows, weight.shape[0])
            target = packed[row + start : row + stop]
            target.copy_(weight.read(start, stop))
            if dtype == torch.float16 and not bool(torch.isfinite(target).all()):
                raise ValueError(
                    f"{weight.name} holds a value that float16 can't hold: use bfloat16 or float32"
                )
        row += weight.shape[0]
        weight.release()
    return packed
