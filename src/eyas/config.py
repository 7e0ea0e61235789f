"""EngineConfig: what a user may choose about an engine. Frozen; contradictions are ValueErrors."""

from dataclasses import dataclass
from typing import Literal

from eyas.drafters.registry import SpeculativeOptions
from eyas.loading.requantise import SCHEMES, Scheme
from eyas.ops.native import ActivationType

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """``model``, ``tokenizer``: a directory, a GGUF file, a Hub id or ``demo``.

    ``dtype``: the type that weights are held in; "auto" keeps them as they are stored, quantised
    ones too. ``quantization``: "q8" or "q4" quantises a float checkpoint as it loads (see
    ``eyas.loading.requantise``); a draft model stays as it is stored. ``activation_dtype``: what
    quantised weights are multiplied with: "int8" (which "auto" is) or "float32"; other weights
    always meet float32. ``kv_cache_dtype``: "auto" is float16.
    ``max_model_len`` (tokens, prompt and output) defaults to the model's own limit.
    ``kv_cache_memory`` is in bytes; None sizes it from what is free. ``num_threads`` None is one
    per core.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: Scheme | None = None
    activation_dtype: ActivationType = "auto"
    kv_cache_dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_threads: int | None = None
    ops: Literal["native", "reference"] = "native"
    speculative: SpeculativeOptions | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model is {self.model!r}: give a path, a Hub id or 'demo'")
        for name in ("dtype", "kv_cache_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: use one of {', '.join(_DTYPES)}"
                )
        if self.quantization is not None and self.quantization not in SCHEMES:
            raise ValueError(
                f"quantization is {self.quantization!r}: use one of {', '.join(SCHEMES)}, or None"
            )
        if self.quantization is not None and self.dtype != "auto":
            raise ValueError(
                f"dtype is {self.dtype!r} and quantization is {self.quantization!r}: weights are "
                "held in one of them, so leave the other out"
            )
        for name in ("max_num_seqs", "block_size"):
            _require_positive(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory", "num_threads"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed is {self.seed!r}: it must be an integer")
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be True or False")
        if self.activation_dtype not in ("auto", "int8", "float32"):
            raise ValueError(
                f"activation_dtype is {self.activation_dtype!r}: use 'auto', 'int8' or 'float32'"
            )
        if self.ops not in ("native", "reference"):
            raise ValueError(f"ops is {self.ops!r}: use 'native' or 'reference'")


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}: it must be an integer of at least 1")
