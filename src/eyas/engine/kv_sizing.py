"""How many KV blocks each layer group gets, so that all groups run out together."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from eyas.engine.memory import free_memory
from eyas.engine.scheduler import SchedulerOptions
from eyas.kv_spec import KVGroupSpec

_DEFAULT_SHARE = 0.4  # of the memory that is free once the model is loaded


@dataclass(frozen=True, slots=True)
class KVDemand:
    """What requests need. ``max_drafts`` is K, the tokens drafted per step (0: none)."""

    groups: tuple[KVGroupSpec, ...]
    element_size: int  # bytes per KV value
    block_size: int  # tokens
    limits: SchedulerOptions
    max_drafts: int

    def full_blocks(self) -> int:
        """Blocks of a request of max_model_len tokens in a group that keeps them all."""
        return -(-self.limits.max_model_len // self.block_size)

    def num_blocks(self, full_blocks: int) -> tuple[int, ...]:
        """Blocks per group where a full one has ``full_blocks``, at least one request's.

        Another group gets what one request needs in the worst step, and in proportion to the full
        blocks what further requests keep between steps: one step's tokens are shared by all.
        """
        one, limits = self.full_blocks(), self.limits
        step = min(limits.max_num_batched_tokens, limits.max_model_len) + self.max_drafts
        counts = []
        for group in self.groups:
            first = group.max_blocks(step, self.block_size)
            further = group.max_blocks(1 + self.max_drafts, self.block_size)
            if first is None or further is None:
                counts.append(full_blocks)
                continue
            first, further = min(first, one), min(further, one)
            counts.append(min(first + -(-(full_blocks - one) * further // one), full_blocks))
        return tuple(counts)

    def num_bytes(self, full_blocks: int) -> int:
        return sum(
            count * self.block_size * group.bytes_per_token(self.element_size)
            for group, count in zip(self.groups, self.num_blocks(full_blocks), strict=True)
        )


def size_kv(
    demand: KVDemand,
    kv_cache_memory: int | None,
    free: Callable[[], int] = free_memory,
) -> tuple[int, ...]:
    """The number of blocks per group.

    ``kv_cache_memory`` bytes are used as far as they go. None takes what max_num_seqs requests of
    max_model_len tokens need, but at most 40 % of the ``free`` memory. ValueError if not even one
    such request fits.
    """
    one = demand.full_blocks()
    if kv_cache_memory is None:
        budget = int(_DEFAULT_SHARE * free())
        most = one * demand.limits.max_num_seqs
    else:
        budget = kv_cache_memory
        most = max(one, budget)  # a block takes at least a byte
    if demand.num_bytes(one) > budget:
        raise ValueError(_too_little(demand, budget, kv_cache_memory is None))
    return demand.num_blocks(_greatest(one, most, lambda n: demand.num_bytes(n) <= budget))


def _too_little(demand: KVDemand, budget: int, is_default: bool) -> str:
    def fits(max_model_len: int) -> bool:
        shorter = replace(demand, limits=_with_length(demand.limits, max_model_len))
        return shorter.num_bytes(shorter.full_blocks()) <= budget

    length = demand.limits.max_model_len
    source = "40 % of the free memory" if is_default else "kv_cache_memory"
    lower = f"lower max_model_len to {_greatest(1, length, fits)}, or " if fits(2) else ""
    return (
        f"the KV cache of one request of max_model_len={length} tokens takes "
        f"{demand.num_bytes(demand.full_blocks())} bytes, but {source} is {budget} bytes: "
        f"{lower}set kv_cache_memory to more"
    )


def _with_length(limits: SchedulerOptions, max_model_len: int) -> SchedulerOptions:
    return replace(limits, max_model_len=max_model_len)


def _greatest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The greatest number in low..high that fits; ``low`` does, and what is below one that does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
