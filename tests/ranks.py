"""Ranks as threads of this process, for what doesn't need processes of their own."""

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from eyas import _core
from eyas.ops.native import NativeOps
from eyas.ops.reference import ReferenceOps
from eyas.parallel import Parallel

Result = TypeVar("Result")
_PATIENCE = 60


def on_ranks(size: int, function: Callable[[int], Result]) -> list[Result]:
    """``function(rank)`` on a thread per rank; the results, or the first rank's exception."""
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
        if errors:
            raise errors[min(errors)]  # others may wait for that rank for ever
        assert not thread.is_alive(), "the ranks wait for each other"
    return [results[rank] for rank in range(size)]


def shared_groups(size: int) -> list[_core.Group]:
    """Each rank's end of a group, over memory that all have."""
    memory = mmap.mmap(-1, _core.shared_group_bytes(size))
    array = np.frombuffer(memory, np.uint8)
    return [_core.SharedGroup(array, rank, size) for rank in range(size)]


def native_ranks(size: int, num_threads: int = 1, **options: object) -> list[NativeOps]:
    groups = shared_groups(size) if size > 1 else [None]
    return [NativeOps(num_threads=num_threads, group=group, **options) for group in groups]


def reference_ranks(size: int) -> list[ReferenceOps]:
    barrier = threading.Barrier(size)
    slots: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange_of(rank: int) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
        def exchange(own: torch.Tensor) -> list[torch.Tensor]:
            slots[rank] = own
            barrier.wait(_PATIENCE)
            everybody = [*slots]
            barrier.wait(_PATIENCE)
            return everybody

        return exchange

    return [
        ReferenceOps(Parallel(rank, size), exchange_of(rank) if size > 1 else None)
        for rank in range(size)
    ]
