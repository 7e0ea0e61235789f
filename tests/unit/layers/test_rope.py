from typing import Any

import pytest
import torch
from bits import same_bits
from implementations import compiled
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.layers.rope import Rope, read_rope
from eyas.ops.native import NativeOps
from eyas.ops.reference import ReferenceOps

EPS = torch.finfo(torch.float32).eps
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
POSITIONS = torch.cat([torch.arange(300), torch.tensor([8191, 8192, 100_000, 131_071])])


def config(rope: dict[str, Any] | None = None, theta: float = 500_000.0) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_scaling": rope, "max_position_embeddings": 131_072}


def reference_angles(rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ReferenceOps().angles(rope.inv_freq, positions)


def native_angles(rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rope makes of the pairs (1, 0)."""
    ops, half = NativeOps(num_threads=2), len(rope.inv_freq)
    turn = compiled(ops, lambda x, at: ops.rope(x, ops.angles(rope.inv_freq, at)))
    pairs = torch.cat([torch.ones(half), torch.zeros(half)]).repeat(len(positions), 1)
    turned = turn(pairs, positions)
    return turned[:, :half], turned[:, half:]


@pytest.mark.parametrize("head_dim", [2, 20, 64, 128])
@pytest.mark.parametrize("rope", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_angles_equal_transformers(rope: dict[str, Any] | None, head_dim: int) -> None:
    theirs = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0, **(rope or {})},
    )
    wanted = LlamaRotaryEmbedding(theirs)(torch.empty(1), POSITIONS[None])
    old_keys = read_rope(config(rope), head_dim)
    new_keys = read_rope(theirs.to_dict(), head_dim)
    for one in (old_keys, new_keys):
        for angles in (reference_angles, native_angles):
            for actual, expected in zip(angles(one, POSITIONS), wanted, strict=True):
                # Nearest values of the same float32 angles: off by one rounding of a library's.
                assert (actual - expected[0, :, : head_dim // 2]).abs().max() <= EPS


@pytest.mark.parametrize("angles", [reference_angles, native_angles])
def test_a_position_ignores_its_neighbours(angles: Any) -> None:
    rope = read_rope(config(LLAMA3), 24)
    everything = angles(rope, POSITIONS)
    for start in range(0, len(POSITIONS), 7):
        for length in (1, 2, 5, 33):
            part = slice(start, start + length)
            for alone, together in zip(angles(rope, POSITIONS[part]), everything, strict=True):
                assert same_bits(alone, together[part])


def test_frequency_factors_divide_the_frequencies() -> None:
    """GGUF files of Llama 3.1 hold its scaling as such factors."""
    plain, scaled = read_rope(config(), 64), read_rope(config(LLAMA3), 64)
    one = torch.tensor([1])
    ratio = (
        torch.asin(reference_angles(plain, one)[1][:, 8:])
        / torch.asin(reference_angles(scaled, one)[1][:, 8:])
    )[0]
    factors = [1.0] * 8 + ratio.tolist()
    by_factors = read_rope({**config(), "rope_freq_factors": factors}, 64)
    positions = torch.arange(1000)
    for actual, expected in zip(
        reference_angles(by_factors, positions), reference_angles(scaled, positions), strict=True
    ):
        # The factors were measured from rounded sines: each a few roundings off.
        assert (actual - expected).abs().max() <= 1000 * 8 * EPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope factor None"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope factor -1"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_theta": 0}, "rope_theta 0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"rope_scaling": {"partial_rotary_factor": 0.25}}, r"partial_rotary_factor 0\.25"),
        ({"rope_freq_factors": [1.0]}, "has 1 entries, but head_dim 64 needs 32"),
        ({"rope_freq_factors": [1.0] * 32, "rope_scaling": LLAMA3}, "scale twice"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_parameters": LLAMA3, "rope_scaling": {"rope_type": "linear"}}, "they differ"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope({**config(), **change}, 64)
