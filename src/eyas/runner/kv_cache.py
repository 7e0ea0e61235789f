"""The KV pools' memory: one pair of tensors per layer, grouped as the models' layer groups."""

from collections.abc import Sequence

import torch

from eyas.kv_spec import KVGroupSpec
from eyas.ops.base import KVLayer


def allocate_kv(
    groups: Sequence[KVGroupSpec], num_blocks: Sequence[int], block_size: int, dtype: torch.dtype
) -> list[list[KVLayer]]:
    """Uninitialised KV of every layer; the kernel commits a page only when it is first written."""
    pools = []
    for spec, blocks in zip(groups, num_blocks, strict=True):
        shape = (blocks * block_size, spec.num_kv_heads, spec.head_dim)
        pools.append(
            [
                KVLayer(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
                for _ in range(spec.num_layers)
            ]
        )
    return pools
