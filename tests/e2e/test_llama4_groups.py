"""Llama 4 through the engine: what its layer groups hold."""

from typing import Any

import pytest
from harness import MakeDrafter, make_engine, tiny_target

from eyas.drafters.ngram import NgramDrafter, Options
from eyas.sampling.params import SamplingParams

CHUNK, BLOCK, DRAFTS = 16, 8, 7
MODEL: tuple[str, int, tuple[tuple[str, Any], ...]] = (
    "llama4_text",
    7,
    (
        ("intermediate_size", 24),
        ("intermediate_size_mlp", 40),
        ("num_local_experts", 4),
        ("num_hidden_layers", 4),
        ("attention_chunk_size", CHUNK),
    ),
)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("drafter", [None, lambda target, ops: NgramDrafter(Options(3, 1))])
def test_a_chunked_group_holds_one_chunk_and_the_step_in_flight(
    drafter: MakeDrafter | None, prefix_caching: bool
) -> None:
    """Over a generation of more than four chunks; the global group holds everything."""
    target, ops = tiny_target(*MODEL)
    assert [group.kv.chunk for group in target.groups] == [CHUNK, None]
    engine = make_engine(
        target,
        ops,
        drafter,
        max_drafts=DRAFTS,
        block_size=BLOCK,
        enable_prefix_caching=prefix_caching,
    )
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, detokenize=False)
    engine.add_request("0", [5, 6, 7, 5, 6, 7, 5, 6], params, output_kind="final_only")
    held, length, finished = [], 0, False
    while not finished:
        finished = bool(engine.step())
        engine.check_integrity()
        if not finished:
            held.append(engine.scheduler.kv.num_used_blocks())
            length = engine.scheduler.running[0].num_computed
            in_flight = DRAFTS + 1
            assert held[-1][0] <= -(-(CHUNK + in_flight) // BLOCK), (length, held[-1])
            assert held[-1][1] >= -(-length // BLOCK)
    assert length > 5 * CHUNK
    assert max(chunked for chunked, _ in held) >= CHUNK // BLOCK
    assert engine.scheduler.kv.num_used_blocks() == (0, 0)


def test_a_block_size_that_does_not_divide_the_chunk_is_refused() -> None:
    target, ops = tiny_target(*MODEL)
    with pytest.raises(ValueError, match="chunks of 16 positions: block_size must divide that"):
        make_engine(target, ops, block_size=5)
