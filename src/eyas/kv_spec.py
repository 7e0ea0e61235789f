"""KV specs: what one layer group keeps, and for how long.

A group is the set of layers (of the target, or of the draft) that share a spec. Block tables,
attention metadata and lifetimes belong to a group, never to a model.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """One layer group's KV.

    Full attention keeps every position. With a ``window`` W a token at position i sees positions
    i - W + 1 .. i; with a ``chunk`` C (chunked local attention) it sees i // C * C .. i. Older ones
    can be freed. ``needs_next_token``: the KV at a position depends on the token after it too, as
    an EAGLE draft's does.
    """

    owner: Literal["target", "draft"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None
    needs_next_token: bool = False

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, self

    @property
    def reach(self) -> int | None:
        """How many positions a token sees at most, its own included (None: all before it)."""
        return self.chunk if self.window is None else self.window

    @property
    def name(self) -> str:
        """For messages and statistics: "target", "draft, window 64", "target, chunk 8192"."""
        if self.reach is None:
            return self.owner
        return f"{self.owner}, {'chunk' if self.window is None else 'window'} {self.reach}"

    def bytes_per_token(self, element_size: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size

    def max_blocks(self, step: int, block_size: int) -> int | None:
        """The most blocks that hold what a request sees and ``step`` positions beyond what is
        committed, wherever that ends (None: as many as there are)."""
        if self.reach is None:
            return None
        span = self.reach - 1 + step
        if self.chunk is not None:  # it begins at a block's edge
            return -(-span // block_size)
        return (span + block_size - 2) // block_size + 1

    def first_needed(self, length: int) -> int:
        """The first position that a query at position ``length`` or later can still see."""
        if self.chunk is not None:
            return length // self.chunk * self.chunk
        return 0 if self.window is None else max(0, length - self.window + 1)
