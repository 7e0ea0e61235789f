"""The KV pools' memory: one cache per layer group, in the layout that the ops like."""

from collections.abc import Sequence

import torch

from eyas.kv_spec import KVGroupSpec
from eyas.ops.base import KVCache, KVShape, Ops


def allocate_kv(
    groups: Sequence[KVGroupSpec],
    num_blocks: Sequence[int],
    block_size: int,
    ops: Ops,
    dtype: torch.dtype,
) -> list[KVCache]:
    """Uninitialised KV of every group. ValueError if there can't be so much."""

    def allocate(spec: KVGroupSpec, blocks: int) -> KVCache:
        shape = KVShape(spec.num_layers, blocks, block_size, spec.num_kv_heads, spec.head_dim)
        try:
            return ops.allocate_kv(shape, dtype)
        except MemoryError as error:
            raise ValueError(
                f"the KV cache can't be allocated ({blocks} blocks of {block_size} tokens in one "
                "layer): lower kv_cache_memory, max_num_seqs or max_model_len"
            ) from error

    return [allocate(spec, blocks) for spec, blocks in zip(groups, num_blocks, strict=True)]
