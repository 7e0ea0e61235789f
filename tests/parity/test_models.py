"""Tiny random models against transformers, layer by layer; and against themselves, bit by bit."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bits import same_bits
from checkpoints import tiny_model
from in_memory import InMemoryWeights
from paged import PagedSequence

from eyas.models.decoder import Decoder
from eyas.models.registry import load_model
from eyas.ops.base import Ops
from eyas.ops.native import NativeOps
from eyas.ops.reference import ReferenceOps

EPS = torch.finfo(torch.float32).eps
LENGTH = 150  # longer than a tile of keys and than every window
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-9-heads": (
        "llama",
        {
            "tie_word_embeddings": True,
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
        },
    ),
    "llama-biases-llama3": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama-linear-one-kv-head": ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1}),
    "llama-no-gqa-wide-heads": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 37}),
    "qwen2": ("qwen2", {}),
    "qwen2-two-groups": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-mixed-layers": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_bias": True,
        },
    ),
}
SPLITS: list[list[int]] = [[LENGTH], [120, 1], [7, 64, 2, 30], [11]]


@dataclass(frozen=True)
class Expected:
    tokens: list[int]
    layers: list[torch.Tensor]  # after each layer but the last, then after the final norm
    logits: torch.Tensor
    largest_head_row: float


def expect(hf: Any) -> Expected:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(hf.config.vocab_size, (1, LENGTH), generator=generator)
    with torch.no_grad():
        out = hf(tokens, output_hidden_states=True)
    head = hf.get_output_embeddings().weight.detach()
    return Expected(
        tokens[0].tolist(),
        [hidden[0] for hidden in out.hidden_states[1:]],
        out.logits[0],
        float(head.norm(dim=1).max()),
    )


def build(hf: Any, ops: Ops) -> Decoder:
    state = dict(hf.state_dict())
    if hf.config.tie_word_embeddings:
        del state["lm_head.weight"]
    model = load_model(hf.config.to_dict(), InMemoryWeights(state), ops, "target")
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(model.logits(hidden.numpy()))


def forward(
    model: Decoder,
    ops: Ops,
    tokens: Sequence[int],
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    seed = len(sizes)
    sequence = PagedSequence(model, ops, len(tokens), block_size=8, seed=seed, dtype=dtype)
    return sequence.forward_in(tokens, sizes)


def check_against(expected: Expected, model: Decoder, ops: Ops) -> None:
    """Each layer adds to a row an error of the order of the row's size: a few tens of roundings,
    those of the sums in its products, norms and softmax."""
    hidden = forward(model, ops, expected.tokens, [LENGTH])
    layers = [after_layers(model, ops, expected.tokens, n) for n in range(1, len(model._layers))]
    assert len(layers) + 1 == len(expected.layers)
    for depth, (actual, wanted) in enumerate(
        zip([*layers, hidden], expected.layers, strict=True), start=1
    ):
        bound = 40 * depth * EPS * wanted.norm(dim=1)
        assert ((actual - wanted).norm(dim=1) <= bound).all(), depth
    bound = 40 * (len(layers) + 2) * EPS * hidden.norm(dim=1) * expected.largest_head_row
    assert ((logits_of(model, hidden) - expected.logits).abs().amax(dim=1) <= bound).all()


def after_layers(model: Decoder, ops: Ops, tokens: Sequence[int], count: int) -> torch.Tensor:
    """Hidden states [T, H] after the first ``count`` layers."""
    part = copy.copy(model)
    part._layers = model._layers[:count]
    part._final_norm = lambda x_TH: x_TH
    part._forward = ops.compile(part._run)
    return forward(part, ops, tokens, [LENGTH])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_layers_and_logits_equal_transformers(name: str, seed: int) -> None:
    model_type, overrides = CONFIGS[name]
    hf = tiny_model(model_type, seed, **overrides)
    ops = NativeOps()
    check_against(expect(hf), build(hf, ops), ops)


@pytest.mark.parametrize("name", ["llama-tied-9-heads", "qwen3-mixed-layers"])
def test_reference_ops_equal_transformers(name: str) -> None:
    model_type, overrides = CONFIGS[name]
    hf = tiny_model(model_type, 2, **overrides)
    ops = ReferenceOps()
    check_against(expect(hf), build(hf, ops), ops)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_split_gives_the_same_bits(name: str) -> None:
    model_type, overrides = CONFIGS[name]
    hf = tiny_model(model_type, 3, **overrides)
    ops = NativeOps()
    model = build(hf, ops)
    tokens = expect(hf).tokens
    hidden = forward(model, ops, tokens, SPLITS[0])
    logits = logits_of(model, hidden)
    for sizes in SPLITS[1:]:
        assert same_bits(forward(model, ops, tokens, sizes), hidden), sizes
    other_ops = NativeOps(num_threads=3)
    other = build(hf, other_ops)
    assert same_bits(forward(other, other_ops, tokens, [29]), hidden)
    for row in (0, 77, LENGTH - 1):
        assert same_bits(logits_of(model, hidden[row : row + 1]), logits[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_split_gives_the_same_bits_with_16_bit_weights_and_cache(dtype: torch.dtype) -> None:
    model_type, overrides = CONFIGS["qwen2-two-groups"]
    hf = tiny_model(model_type, 3, **overrides)
    ops = NativeOps(dtype)
    model = build(hf, ops)
    expected = expect(hf)
    hidden = forward(model, ops, expected.tokens, SPLITS[0], dtype)
    for sizes in ([31], [1]):
        assert same_bits(forward(model, ops, expected.tokens, sizes, dtype), hidden), sizes
    error = (logits_of(model, hidden) - expected.logits).norm() / expected.logits.norm()
    assert error < 16 * torch.finfo(dtype).eps  # three layers of values rounded to 16 bits


@pytest.mark.parametrize("name", ["llama", "qwen3-mixed-layers"])
def test_reference_splits_give_the_same_bits(name: str) -> None:
    model_type, overrides = CONFIGS[name]
    hf = tiny_model(model_type, 3, **overrides)
    ops = ReferenceOps()
    model = build(hf, ops)
    tokens = expect(hf).tokens[:90]
    hidden = forward(model, ops, tokens, [90])
    assert same_bits(forward(model, ops, tokens, [11, 1, 30]), hidden)


def test_groups_are_the_layers_by_kv_spec_in_order() -> None:
    model_type, overrides = CONFIGS["qwen3-mixed-layers"]
    model = build(tiny_model(model_type, 0, **overrides), NativeOps())
    assert [(group.kv.num_layers, group.kv.window) for group in model.groups] == [
        (2, 33),
        (2, None),
    ]
    for group in model.groups:
        assert (group.kv.owner, group.kv.num_kv_heads, group.kv.head_dim) == ("target", 2, 8)
        assert group.attention.num_query_heads == 6
        assert group.attention.window == group.kv.window
    assert (model.vocab_size, model.hidden_size, model.max_position) == (260, 48, 256)
