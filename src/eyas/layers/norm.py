"""Normalisation."""

import torch

from eyas.layers.source import Source
from eyas.ops.base import Ops, Value


class RMSNorm:
    """Root-mean-square norm (Zhang and Sennrich 2019) of each run of ``len(weight)`` values."""

    def __init__(self, ops: Ops, weight_H: torch.Tensor, eps: float) -> None:
        self._ops = ops
        self._weight_H = weight_H
        self._eps = eps

    def __call__(self, x: Value) -> Value:
        return self._ops.rms_norm(x, self._weight_H, self._eps)


def load_rms_norm(source: Source, name: str, size: int, eps: float) -> RMSNorm:
    return RMSNorm(source.ops, source.vector(f"{name}.weight", size), eps)
