"""Reading Hugging Face configs: what the models of the Llama family have in common.

A key that changes what a model computes is honoured or refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.layers.attention import AttentionSpec
from eyas.layers.rope import Rope, read_rope
from eyas.ops.base import AttentionShape

_MOST_LAYERS = 10_000  # a damaged config must not cost memory before the first tensor is missed


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Sizes and settings that every dense model of the family has."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tied_head: bool
    rope: Rope

    def attention(
        self,
        window: int | None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> AttentionSpec:
        """A layer's attention; ``qk_norm``: with head norms, of the model's epsilon."""
        return AttentionSpec(
            shape=AttentionShape(self.num_query_heads, self.num_kv_heads, self.head_dim, window),
            rope=self.rope,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm_eps=self.norm_eps if qk_norm else None,
        )


def read_dense_config(config: dict[str, Any], default_head_dim: int | None = None) -> DenseConfig:
    """The common part of a config; ``default_head_dim`` None: hidden size / heads.

    ValueError naming the key that is missing, malformed or asks for what isn't supported.
    """
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config is not supported: use an unquantised checkpoint or a GGUF file"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported: only 'silu' is")
    hidden_size = read_size(config, "hidden_size")
    num_query_heads = read_size(config, "num_attention_heads")
    num_kv_heads = read_size(config, "num_key_value_heads", num_query_heads)
    if num_query_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads {num_query_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    if default_head_dim is None and config.get("head_dim") is None:
        if hidden_size % num_query_heads:
            raise ValueError(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads "
                f"{num_query_heads}, and there is no head_dim"
            )
        default_head_dim = hidden_size // num_query_heads
    head_dim = read_size(config, "head_dim", default_head_dim)
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd, and rope needs pairs")
    return DenseConfig(
        vocab_size=read_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_size(config, "intermediate_size"),
        num_layers=read_size(config, "num_hidden_layers", most=_MOST_LAYERS),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=read_size(config, "max_position_embeddings"),
        norm_eps=_read_epsilon(config),
        tied_head=read_flag(config, "tie_word_embeddings"),
        rope=read_rope(config, head_dim),
    )


def read_size(
    config: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31 - 1
) -> int:
    """A positive integer, at most ``most``; null counts as absent."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"the config has no {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{key} {value!r} must be a positive integer")
    if value > most:
        raise ValueError(f"{key} {value} is more than any model has: at most {most} is taken")
    return value


def read_flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} {value!r} must be true or false")
    return value


def read_window(config: Mapping[str, Any]) -> int | None:
    """``sliding_window``: an integer, or null for full attention."""
    if config.get("sliding_window") is None:
        return None
    return read_size(config, "sliding_window")


def read_layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, from ``use_sliding_window``, ``sliding_window`` and either
    ``layer_types`` or, as in older configs, ``max_window_layers``: so many layers have none."""
    window = read_window(config) if read_flag(config, "use_sliding_window") else None
    kinds = _read_layer_types(config)
    if kinds is None:
        if window is None:
            return (None,) * num_layers
        full = config.get("max_window_layers")
        if not isinstance(full, int) or full < 0:
            raise ValueError(f"max_window_layers {full!r} must be an integer of at least 0")
        return tuple(window if i >= full else None for i in range(num_layers))

    known = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != num_layers:
        raise ValueError(
            f"layer_types has {len(kinds)} entries, but num_hidden_layers is {num_layers}"
        )
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"layer type {kind!r} is not supported: {', '.join(known)} are")
        if kind == "sliding_attention" and window is None:
            raise ValueError("layer_types has 'sliding_attention', but there is no sliding window")
    return tuple(known[kind] for kind in kinds)


def require_full_attention(config: Mapping[str, Any]) -> None:
    """ValueError if ``layer_types`` names anything but full attention."""
    for kind in _read_layer_types(config) or ():
        if kind != "full_attention":
            raise ValueError(f"layer type {kind!r} is not supported by this model type")


def _read_layer_types(config: Mapping[str, Any]) -> list[str] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"layer_types {str(kinds)[:60]} must be a list of strings")
    return kinds


def _read_epsilon(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"rms_norm_eps {value!r} must be a number from 0 to below 1")
    return float(value)
