"""The KV pools' memory: one pair of tensors per layer, grouped as the models' layer groups."""

from collections.abc import Sequence

import torch

from eyas.kv_spec import KVGroupSpec
from eyas.ops.base import KVLayer


def allocate_kv(
    groups: Sequence[KVGroupSpec], num_blocks: Sequence[int], block_size: int, dtype: torch.dtype
) -> list[list[KVLayer]]:
    """Uninitialised KV of every layer; the kernel commits a page only when it is first written.

    ValueError if there can't be so much.
    """

    def allocate(spec: KVGroupSpec, blocks: int) -> torch.Tensor:
        shape = (blocks * block_size, spec.num_kv_heads, spec.head_dim)
        try:
            return torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError) as error:  # no such memory; no such number
            raise ValueError(
                f"the KV cache can't be allocated ({blocks} blocks of {block_size} tokens in one "
                "layer): lower kv_cache_memory, max_num_seqs or max_model_len"
            ) from error

    return [
        [KVLayer(allocate(spec, blocks), allocate(spec, blocks)) for _ in range(spec.num_layers)]
        for spec, blocks in zip(groups, num_blocks, strict=True)
    ]
