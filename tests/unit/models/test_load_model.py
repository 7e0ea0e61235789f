from typing import Any

import pytest
import torch
from checkpoints import tiny_model
from in_memory import InMemoryWeights

from eyas.models.base import Model
from eyas.models.registry import available_models, load_model
from eyas.ops.native import NativeOps


def load(hf: Any, change: dict[str, Any], **extra: torch.Tensor) -> Model:
    weights = InMemoryWeights({**hf.state_dict(), **extra})
    return load_model({**hf.config.to_dict(), **change}, weights, NativeOps(), "draft")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny_model(name) for name in ("llama", "mistral", "qwen2", "qwen3")}


def test_the_models_are_found_by_their_files() -> None:
    assert {"llama", "llama4", "llama4_text", "mistral", "qwen2", "qwen3"} <= set(
        available_models()
    )
    assert not {"base", "registry", "decoder"} & set(available_models())


@pytest.mark.parametrize("name", ["gpt2", "base", "registry", "../llama", "llama.load", None, 3])
def test_an_unknown_model_type_is_refused(name: object) -> None:
    with pytest.raises(
        ValueError, match=r"model_type .* is not supported: llama, llama4, .*mistral, qwen2"
    ):
        load_model({"model_type": name}, InMemoryWeights({}), NativeOps(), "target")


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple"),
        ("llama", {"head_dim": 7}, "head_dim 7 is odd"),
        ("llama", {"hidden_size": None}, "no hidden_size"),
        ("llama", {"hidden_size": 49, "head_dim": None}, "hidden_size 49"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is more"),
        ("llama", {"vocab_size": "260"}, "vocab_size '260'"),
        ("llama", {"layer_types": 5}, "layer_types 5 must be a list"),
        ("qwen2", {"layer_types": [[1], [2]]}, "must be a list of strings"),
        ("llama", {"rope_freq_factors": 1.5}, "rope_freq_factors 1.5 must be a list"),
        ("llama", {"rope_freq_factors": [1.0, 2.0, 3.0, "x"]}, "entry 3 'x' must be a positive"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": "x",
                }
            },
            "original_max_position_embeddings 'x' must be a positive",
        ),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps '1e-5'"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps inf"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings 1"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"sliding_window": 8}, "sliding_window 8"),
        ("llama", {"layer_types": ["chunked_attention"]}, "'chunked_attention'"),
        ("llama", {"attention_bias": True}, "q_proj.bias"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1"),
        ("qwen2", {"layer_types": ["full_attention", "odd"]}, "'odd'"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding window"),
        (
            "qwen3",
            {
                "layer_types": None,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": None,
            },
            "max_window_layers None",
        ),
    ],
)
def test_a_config_that_a_model_cannot_honour_is_refused(
    models: dict[str, Any], model_type: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(models[model_type], change)


def test_mistral_needs_to_know_its_window(models: dict[str, Any]) -> None:
    config = models["mistral"].config.to_dict()
    del config["sliding_window"]
    with pytest.raises(ValueError, match="no sliding_window"):
        load_model(config, InMemoryWeights({}), NativeOps(), "target")


def test_older_configs_count_the_layers_without_a_window(models: dict[str, Any]) -> None:
    change = {
        "layer_types": None,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    model = load(models["qwen2"], change)
    assert [(group.kv.owner, group.kv.window) for group in model.groups] == [
        ("draft", None),
        ("draft", 8),
    ]


def test_weights_that_nobody_takes_are_refused(models: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"score\.weight"):
        load(models["llama"], {}, **{"score.weight": torch.zeros(2, 48)})


def test_frequencies_stored_by_old_conversions_are_taken(models: dict[str, Any]) -> None:
    stored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    load(models["llama"], {}, **stored)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(models: dict[str, Any]) -> None:
    hf = tiny_model("llama", tie_word_embeddings=True)
    load(hf, {})  # transformers' state dict holds both names
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        load(models["llama"], {"tie_word_embeddings": True})
