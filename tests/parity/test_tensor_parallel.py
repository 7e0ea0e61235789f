"""Models in shards: each rank's states and logits are transformers', layer by layer, and the bits
of a row are the same on all ranks and in every batch."""

from pathlib import Path
from typing import Any

import pytest
import test_llama4
import torch
from bits import same_bits
from checkpoints import tiny_model
from ranks import native_ranks, on_ranks, reference_ranks
from test_models import CONFIGS, SPLITS, build, check_against, expect, forward, logits_of

SIZES = (2, 3, 4)
NAMES = (
    "llama-tied-9-heads",
    "llama-biases-llama3",
    "llama-linear-one-kv-head",
    "qwen3-mixed-layers",
)


def tiny(name: str, seed: int) -> Any:
    model_type, overrides = CONFIGS[name]
    return tiny_model(model_type, seed, **overrides)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_layers_and_logits_equal_transformers(name: str, size: int) -> None:
    hf = tiny(name, 0)
    expected, ranks = expect(hf), native_ranks(size)
    on_ranks(size, lambda rank: check_against(expected, build(hf, ranks[rank]), ranks[rank]))


@pytest.mark.parametrize(("name", "size"), [("scout", 2), ("maverick", 3), ("scout", 4)])
def test_llama4_equals_transformers(name: str, size: int, tmp_path: Path) -> None:
    overrides = test_llama4.CONFIGS[name]
    hf, path = test_llama4.tiny_llama4(1, **overrides), test_llama4.saved(tmp_path, 1, **overrides)
    with torch.no_grad():
        wanted = hf(torch.tensor([test_llama4.tokens()])).logits[0]
    ranks = native_ranks(size)

    def check(rank: int) -> torch.Tensor:
        model = test_llama4.load(path, ranks[rank])
        hidden = test_llama4.forward(model, ranks[rank], [test_llama4.LENGTH])
        test_llama4.check_logits(hf, model, hidden, wanted)
        assert same_bits(test_llama4.forward(model, ranks[rank], [9, 1, 30, 2]), hidden)
        return hidden

    first, *others = on_ranks(size, check)
    assert all(same_bits(other, first) for other in others)


def test_reference_ops_equal_transformers() -> None:
    hf = tiny("llama-tied-9-heads", 2)
    expected, ranks = expect(hf), reference_ranks(2)
    on_ranks(2, lambda rank: check_against(expected, build(hf, ranks[rank]), ranks[rank]))


@pytest.mark.parametrize("size", SIZES)
def test_every_split_gives_the_same_bits_on_every_rank(size: int) -> None:
    hf = tiny("llama-tied-9-heads", 3)
    tokens = expect(hf).tokens

    def run(num_threads: int, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ranks = native_ranks(size, num_threads)

        def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            model = build(hf, ranks[rank])
            hidden = forward(model, ranks[rank], tokens, sizes)
            return hidden, logits_of(model, hidden[[0, 7, -1]])

        return on_ranks(size, work)

    first, *others = run(1, SPLITS[0])
    others += run(2, SPLITS[1]) + run(1, SPLITS[3])
    for hidden, logits in others:
        assert same_bits(hidden, first[0])
        assert same_bits(logits, first[1])


@pytest.mark.parametrize("size", SIZES)
def test_groups_hold_the_ranks_heads(size: int) -> None:
    hf = tiny("llama-tied-9-heads", 0)
    ranks = native_ranks(size)
    groups = [build(hf, ops).groups[0] for ops in ranks]
    held = [(group.attention.num_query_heads, group.kv.num_kv_heads) for group in groups]
    assert (
        held
        == {
            2: [(6, 2), (3, 1)],
            3: [(3, 1)] * 3,
            4: [(2, 1), (1, 1), (3, 1), (3, 1)],
        }[size]
    )


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 10 is more than the model's 9"):
        build(tiny("llama-tied-9-heads", 0), native_ranks(10)[0])
