"""Every implementation of Ops that this machine can run, at any number of threads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from eyas import _core
from eyas.ops.base import Ops
from eyas.ops.native import ActivationType, NativeOps
from eyas.ops.reference import ReferenceOps

THREADS = (1, 2, 3)


def compiled(ops: Ops, function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``ops.compile(function)``, over tensors."""
    run = ops.compile(function)

    def call(*arguments: Any) -> torch.Tensor:
        arrays = (a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments)
        return torch.from_numpy(run(*arrays))

    return call


@dataclass(frozen=True)
class Family:
    """Ops that promise the same bits as one another; ``at`` has one for each of THREADS."""

    name: str
    at: Callable[[int], Ops]


@cache
def _native(instruction_set: str, activation_dtype: ActivationType, num_threads: int) -> NativeOps:
    return NativeOps(None, activation_dtype, num_threads, instruction_set)


def _families(activation_dtype: ActivationType) -> list[Family]:
    def at(instruction_set: str) -> Callable[[int], Ops]:
        return lambda num_threads: _native(instruction_set, activation_dtype, num_threads)

    return [Family(f"{isa}-{activation_dtype}", at(isa)) for isa in _core.instruction_sets()]


_REFERENCE = ReferenceOps()
REFERENCE = Family("reference", lambda num_threads: _REFERENCE)
FLOAT = _families("float32")
INT8 = _families("int8")
ALL = [REFERENCE, *FLOAT]  # for what does not depend on the type of activations
