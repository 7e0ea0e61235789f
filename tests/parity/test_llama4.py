"""Llama 4 on tiny random models: against transformers with brute-force masks, layer by layer; and
against itself, bit by bit."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from checkpoints import save_tiny_hf, tiny_model
from paged import PagedSequence

from eyas.loading.checkpoint import open_checkpoint
from eyas.loading.requantise import QuantisedWeights
from eyas.loading.weights import CheckpointWeights
from eyas.models.base import Model
from eyas.models.registry import load_model
from eyas.ops.base import Ops
from eyas.ops.native import NativeOps
from eyas.ops.reference import ReferenceOps

EPS = torch.finfo(torch.float32).eps
LENGTH = 70
SCOUT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "scout": {"rope_parameters": SCOUT_ROPE},
    "maverick": {"interleave_moe_layer_step": 2, "use_qk_norm": False},
    "two-experts-of-each": {"num_experts_per_tok": 2},
    "all-experts": {"num_experts_per_tok": 4, "num_hidden_layers": 2},
    "dense": {"moe_layers": []},
    "listed-layers": {"moe_layers": [0, 3], "no_rope_layers": [0, 1, 1, 0]},
    "no-temperature": {"attn_temperature_tuning": False, "no_rope_layer_interval": 2},
    "no-chunks": {"attention_chunk_size": None, "num_hidden_layers": 2},
    "one-chunk": {"attention_chunk_size": 128, "num_hidden_layers": 2},
    "biases-tied": {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 12},
}


def tiny_llama4(seed: int = 0, **overrides: Any) -> Any:
    return tiny_model("llama4_text", seed, **{**BASE, **overrides})


def saved(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    return save_tiny_hf(folder, "llama4_text", seed, **{**BASE, **overrides})


def load(path: Path, ops: Ops, num_layers: int | None = None) -> Model:
    """The saved model, or its first ``num_layers`` layers with its norm and head."""
    checkpoint = open_checkpoint(str(path))
    config, tensors = dict(checkpoint.config), checkpoint.weights.takeable()
    if num_layers is not None:
        whole = config["num_hidden_layers"]
        dropped = tuple(f"model.layers.{n}." for n in range(num_layers, whole))
        tensors = [tensor for tensor in tensors if not tensor.name.startswith(dropped)]
        config["num_hidden_layers"] = num_layers
    tied = config["tie_word_embeddings"]
    return load_model(config, CheckpointWeights(tensors, str(path), tied), ops, "target")


@cache
def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(260, (LENGTH,), generator=generator).tolist()


def masks(chunk: int | None) -> dict[str, torch.Tensor]:
    """What transformers adds to the scores [1, 1, T, T]: 0 where key j is seen from query i."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    causal = j <= i
    chunked = causal & (i // (chunk or LENGTH) == j // (chunk or LENGTH))
    return {
        kind: torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
        for kind, seen in (("full_attention", causal), ("chunked_attention", chunked))
    }


def forward(model: Model, ops: Ops, sizes: list[int]) -> torch.Tensor:
    sequence = PagedSequence(model, ops, LENGTH, block_size=8, seed=len(sizes))
    return sequence.forward_in(tokens(), sizes)


def check_logits(hf: Any, model: Model, hidden: torch.Tensor, wanted: torch.Tensor) -> None:
    logits = torch.from_numpy(model.logits(hidden.numpy()))
    row = float(hf.get_output_embeddings().weight.detach().norm(dim=1).max())
    bound = 40 * (hf.config.get_text_config().num_hidden_layers + 1) * EPS
    assert ((logits - wanted).abs().amax(dim=1) <= bound * hidden.norm(dim=1) * row).all()


@pytest.mark.parametrize("make_ops", [NativeOps, ReferenceOps])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_and_logits_equal_transformers(
    name: str, make_ops: type[NativeOps] | type[ReferenceOps], tmp_path: Path
) -> None:
    """Each layer adds to a row an error of a few tens of roundings of the row's size, and the norm
    after it keeps relative errors."""
    hf, ops = tiny_llama4(**CONFIGS[name]), make_ops()
    path = saved(tmp_path, **CONFIGS[name])
    with torch.no_grad():
        out = hf(
            torch.tensor([tokens()]),
            attention_mask=masks(hf.config.attention_chunk_size),
            output_hidden_states=True,
        )
        normed = [hf.model.norm(hidden[0]) for hidden in out.hidden_states[1:-1]]
    wanted = [*normed, out.hidden_states[-1][0]]
    counts = range(1, len(wanted) + 1)
    if make_ops is ReferenceOps:
        counts = range(len(wanted), len(wanted) + 1)
    for count in counts:
        model = load(path, ops, count)
        hidden = forward(model, ops, [LENGTH])
        bound = 40 * count * EPS * wanted[count - 1].norm(dim=1)
        assert ((hidden - wanted[count - 1]).norm(dim=1) <= bound).all(), count
    check_logits(hf, model, hidden, out.logits[0])


@pytest.mark.parametrize("name", ["scout", "maverick", "no-chunks"])
def test_transformers_own_masks_agree(name: str, tmp_path: Path) -> None:
    hf, ops = tiny_llama4(1, **CONFIGS[name]), NativeOps()
    model = load(saved(tmp_path, 1, **CONFIGS[name]), ops)
    with torch.no_grad():
        logits = hf(torch.tensor([tokens()])).logits[0]
    check_logits(hf, model, forward(model, ops, [LENGTH]), logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_split_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Token by token and in pieces, over chunk boundaries, on one thread and on three."""
    path, ops, other_ops = (
        saved(tmp_path, 2, **CONFIGS[name]),
        NativeOps(),
        NativeOps(None, "auto", 3),
    )
    model, other = load(path, ops), load(path, other_ops)
    hidden = forward(model, ops, [LENGTH])
    for sizes in ([1], [15, 2, 16, 1], [5], [40, 8]):
        assert same_bits(forward(model, ops, sizes), hidden), sizes
    assert same_bits(forward(other, other_ops, [29]), hidden)


def conditional(seed: int, **overrides: Any) -> Any:
    import transformers

    text = tiny_llama4(seed, **overrides)
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    config = transformers.Llama4Config(text_config=text.config.to_dict(), vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    model.language_model.load_state_dict(text.state_dict())
    return model


@pytest.mark.parametrize("drop_defaults", [False, True])
def test_the_text_part_of_a_model_with_vision(
    drop_defaults: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = conditional(3, rope_parameters=SCOUT_ROPE)
    hf.save_pretrained(tmp_path)
    if drop_defaults:  # as transformers' own text_config may lack what is as in its class
        stored = json.loads((tmp_path / "config.json").read_text())
        for key in (
            "interleave_moe_layer_step",
            "use_qk_norm",
            "layer_types",
            "rms_norm_eps",
            "no_rope_layers",
            "moe_layers",
            "attn_temperature_tuning",
        ):
            del stored["text_config"][key]
        (tmp_path / "config.json").write_text(json.dumps(stored))
    ops = NativeOps()
    with caplog.at_level(logging.INFO):
        model = load(tmp_path, ops)
    assert len([r for r in caplog.records if "vision tensors" in r.message]) == 1
    with torch.no_grad():
        logits = hf(torch.tensor([tokens()])).logits[0]
    check_logits(hf, model, forward(model, ops, [LENGTH]), logits)


def test_groups_are_chunked_and_global_layers(tmp_path: Path) -> None:
    model = load(saved(tmp_path, **CONFIGS["scout"]), NativeOps())
    assert [(g.kv.num_layers, g.kv.chunk, g.kv.window) for g in model.groups] == [
        (3, 16, None),
        (1, None, None),
    ]
    model = load(saved(tmp_path, **CONFIGS["no-chunks"]), NativeOps())
    assert [(g.kv.num_layers, g.kv.chunk) for g in model.groups] == [(2, None)]


@pytest.mark.parametrize("scheme", ["q8", "q4"])
def test_quantised_as_it_loads_equals_quantised_values(
    scheme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix of the experts is rounded to blocks along its inputs, and the router isn't."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
    }
    path, ops = saved(tmp_path, **sizes), NativeOps(None, "float32")
    checkpoint = open_checkpoint(str(path))
    first = QuantisedWeights(checkpoint.weights, scheme, ops.context)
    model = load_model(checkpoint.config, first, ops, "target")
    hidden = forward(model, ops, [LENGTH])

    weights = QuantisedWeights(open_checkpoint(str(path)).weights, scheme, ops.context)
    experts = "model.layers.0.feed_forward.experts"
    up = weights.take(f"{experts}.2.up_proj.weight", (32, 64))
    assert up.format == {"q8": "q8_0", "q4": "q4_1"}[scheme]
    hf = tiny_llama4(**sizes)
    exact = hf.state_dict()[f"{experts}.gate_up_proj"][2, :, 32:].T
    steps = exact.abs().amax() / 127 if scheme == "q8" else (exact.amax() - exact.amin()) / 15
    assert (up.read() - exact).abs().max() <= 0.51 * steps
    assert weights.take("model.layers.0.feed_forward.router.weight", (4, 64)).format == "f32"

    again = QuantisedWeights(open_checkpoint(str(path)).weights, scheme, ops.context)
    model = load_model(checkpoint.config, again, ops, "target")
    assert same_bits(forward(model, ops, [LENGTH]), hidden)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds num_local_experts 4"),
        ({"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers .* 0 and 1"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers has 2 entries, but num_hidden_layers is 4"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types differs"),
        ({"moe_layers": [-1]}, "moe_layers"),
        ({"moe_layers": [0]}, "no tensor model.layers.1.feed_forward.down_proj.weight"),
        ({"attention_chunk_size": 0}, "attention_chunk_size 0 must be a positive integer"),
        ({"floor_scale": 0}, "floor_scale 0 must be a positive integer"),
        ({"attn_scale": "big"}, "attn_scale 'big' must be a number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_local_experts": 8, "moe_layers": [0, 1, 2, 3]}, "shape"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    stored = json.loads((path / "config.json").read_text())
    del stored["layer_types"]
    (path / "config.json").write_text(json.dumps({**stored, **changes}))
    with pytest.raises(ValueError, match=message):
        load(path, NativeOps())
