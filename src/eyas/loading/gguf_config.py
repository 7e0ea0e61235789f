"""A GGUF file's metadata as a Hugging Face config."""

from typing import Any

import numpy as np

from eyas.loading.gguf import GGUFFile
from eyas.loading.mapped import MappedTensor
from eyas.loading.name_map import ROPE_FREQS

# general.architecture is the Hugging Face model_type for these.
ARCHITECTURES = ("llama", "llama4", "qwen2", "qwen3")

# Metadata that changes the arithmetic in ways no model here implements, unless it has this value.
_MUST_BE = {
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
}
_DENSE_MUST_BE = {"expert_count": 0}
_SIGMOID = 2
_LLAMA4_MUST_BE = {"expert_gating_func": _SIGMOID, "leading_dense_block_count": 0}
# What llama.cpp takes a Llama 4 file to mean that doesn't say so.
_LLAMA4_CHUNK = _LLAMA4_FLOOR_SCALE = 8192
_LLAMA4_ATTN_SCALE = 0.1
_LLAMA4_NO_ROPE_INTERVAL = 4
_MAVERICK_EXPERTS = 128  # the only model without norms on q and k


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The config, with Hugging Face keys. One more key, ``rope_freq_factors`` (list of
    head_dim / 2 floats), is there if the file holds them: each rotary frequency is to be divided
    by its factor. ValueError for an architecture or setting that can't be honoured.
    """
    if file.integer("split.count", 1) > 1:
        raise ValueError(f"{file.path} is one piece of a split model: merge the pieces first")
    arch = file.string("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} has the architecture {arch!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    for key, value in (
        _MUST_BE | (_LLAMA4_MUST_BE if arch == "llama4" else _DENSE_MUST_BE)
    ).items():
        stored = file.metadata.get(f"{arch}.{key}", value)
        if isinstance(stored, list | np.ndarray):
            raise ValueError(f"{file.path}: {arch}.{key} is an array, which is not supported")
        if stored != value:
            raise ValueError(f"{file.path}: {arch}.{key} = {stored!r} is not supported")

    num_heads = _positive(file, f"{arch}.attention.head_count")
    hidden_size = _positive(file, f"{arch}.embedding_length")
    head_dim = _positive(file, f"{arch}.attention.key_length", hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"{file.path}: a head size of {head_dim} is odd, and rope needs pairs")
    for key in ("attention.value_length", "rope.dimension_count"):
        stored = file.integer(f"{arch}.{key}", head_dim)
        if stored != head_dim:
            raise ValueError(
                f"{file.path}: {arch}.{key} = {stored} differs from the head size {head_dim}, "
                f"which is not supported"
            )
    config: dict[str, Any] = {
        "model_type": arch,
        "hidden_size": hidden_size,
        "intermediate_size": _positive(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _positive(file, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _positive(file, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, arch),
        "max_position_embeddings": _positive(file, f"{arch}.context_length"),
        "vocab_size": _vocab_size(file, arch),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    window = file.integer(f"{arch}.attention.sliding_window", 0)
    if arch == "llama4":
        config |= _llama4(file, config)
    elif window:  # in every layer; Hugging Face's llama with a window is called mistral
        config.update(sliding_window=window, use_sliding_window=True, max_window_layers=0)
        config["model_type"] = "mistral" if arch == "llama" else arch
    for key in ("bos", "eos"):
        if f"tokenizer.ggml.{key}_token_id" in file.metadata:
            config[f"{key}_token_id"] = file.integer(f"tokenizer.ggml.{key}_token_id")
    if ROPE_FREQS in file.tensors:
        config["rope_freq_factors"] = _rope_freq_factors(file, head_dim)
    return config


def _llama4(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """What a Llama 4 config has of its own. In these files a window is a chunk; none that is
    written means the published models' 8192, and 0 means rope and full attention in every layer."""
    num_layers, num_experts = config["num_hidden_layers"], file.integer("llama4.expert_count", 0)
    own = {
        "intermediate_size_mlp": config["intermediate_size"],
        "use_qk_norm": num_experts != _MAVERICK_EXPERTS,
        "moe_layers": [],
    }
    if num_experts:
        step = _positive(file, "llama4.interleave_moe_layer_step")
        own |= {
            "num_local_experts": num_experts,
            "num_experts_per_tok": _positive(file, "llama4.expert_used_count"),
            "intermediate_size": _positive(file, "llama4.expert_feed_forward_length"),
            "moe_layers": list(range(step - 1, num_layers, step)),
        }
    chunk = file.integer("llama4.attention.sliding_window", _LLAMA4_CHUNK)
    if chunk == 0:
        return own | {
            "attention_chunk_size": None,
            "no_rope_layers": [1] * num_layers,
            "attn_temperature_tuning": False,
        }
    length, scale = "attention.temperature_length", "attention.temperature_scale"
    return own | {
        "attention_chunk_size": chunk,
        "no_rope_layer_interval": _LLAMA4_NO_ROPE_INTERVAL,
        "attn_temperature_tuning": True,
        "floor_scale": file.integer(f"llama4.{length}", _LLAMA4_FLOOR_SCALE),
        "attn_scale": file.number(f"llama4.{scale}", _LLAMA4_ATTN_SCALE),
    }


def _positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.integer(key, default)
    if value < 1:
        raise ValueError(f"{file.path}: metadata {key} is {value}, but must be positive")
    return value


def _vocab_size(file: GGUFFile, arch: str) -> int:
    if "tokenizer.ggml.tokens" in file.metadata:
        return len(file.strings("tokenizer.ggml.tokens"))
    return _positive(file, f"{arch}.vocab_size")


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    kind = file.string(f"{arch}.rope.scaling.type", "")
    old_factor = file.number(f"{arch}.rope.scale_linear", 1.0)  # before rope.scaling.* existed
    factor = file.number(f"{arch}.rope.scaling.factor", old_factor)
    if kind not in ("", "none", "linear"):
        raise ValueError(f"{file.path}: {arch}.rope.scaling.type = {kind!r} is not supported")
    if factor <= 0:
        raise ValueError(f"{file.path}: the rope scaling factor is {factor}, but must be positive")
    if kind == "none" or factor == 1.0:
        return None
    return {"rope_type": "linear", "factor": factor}


def _rope_freq_factors(file: GGUFFile, head_dim: int) -> list[float]:
    entry = file.tensors[ROPE_FREQS]
    tensor = MappedTensor(entry.name, entry.shape, entry.format, file.file, entry.offset)
    if entry.shape != (head_dim // 2,):
        raise ValueError(
            f"tensor {ROPE_FREQS} in {file.path} has shape {list(entry.shape)}, "
            f"but a head size of {head_dim} calls for {[head_dim // 2]}"
        )
    factors: list[float] = tensor.read().tolist()
    if min(factors) <= 0:
        raise ValueError(f"tensor {ROPE_FREQS} in {file.path} holds {min(factors)}, not positive")
    return factors
