"""The Executor protocol: where the forward runs (this process, several, other machines)."""

from typing import Protocol

from eyas.kv_spec import KVGroupSpec
from eyas.types import StepPlan, StepResult


class Executor(Protocol):
    """``groups``: the target's layer groups, then the draft's; block tables follow this order."""

    groups: tuple[KVGroupSpec, ...]
    kv_element_size: int  # bytes per KV value
    vocab_size: int  # the target's
    max_position: int  # the longest context that the target was trained for, in tokens

    def allocate_kv(self, num_blocks: tuple[int, ...], block_size: int) -> None:
        """Allocate each group's KV pool; once, before the first ``execute``."""
        ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    def shutdown(self) -> None: ...
