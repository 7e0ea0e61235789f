"""KV specs: what one layer group keeps, and for how long.

A group is the set of layers (of the target, or of the draft) that share a spec. Block tables,
attention metadata and lifetimes belong to a group, never to a model.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """One layer group's KV: ``window`` None keeps every position (full attention); a window W lets
    a token at position i see positions i - W + 1 .. i, and older ones can be freed."""

    owner: Literal["target", "draft"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def bytes_per_token(self, element_size: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size

    def first_needed(self, length: int) -> int:
        """The first position that a query at position ``length`` or later can still see."""
        return 0 if self.window is None else max(0, length - self.window + 1)
