"""Rotary position embedding (Su et al. 2021) and how a config describes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """``inv_freq`` [D / 2] float32: an angle is the float32 product of position and frequency, as
    transformers computes it and as the checkpoints were trained. ``interleaved``: as in
    Ops.rope."""

    inv_freq: torch.Tensor
    interleaved: bool = False


def read_rope(config: dict[str, Any], head_dim: int, interleaved: bool = False) -> Rope:
    """The rope that ``config`` describes, in transformers' old keys (rope_theta, rope_scaling) or
    new one (rope_parameters). ``rope_freq_factors``, from a GGUF file, divides the frequencies.

    Types "default", "linear" and "llama3" (Llama 3.1) are known; ValueError naming any other.
    """
    parameters = _parameters(config)
    for partial in (config.get("partial_rotary_factor"), parameters.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {partial} is not supported: only 1 is")
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float) or not 0 < theta < 1e30:
        raise ValueError(f"rope_theta {theta!r} must be a positive number, below 1e30")
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))

    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "linear":
        inv_freq /= _positive(parameters, "factor")
    elif kind == "llama3":
        original = parameters.get("original_max_position_embeddings")
        key = "max_position_embeddings" if original is None else "original_max_position_embeddings"
        length = _positive(config if original is None else parameters, key)
        inv_freq = _llama3(inv_freq, parameters, length)
    elif kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported: default, linear and llama3 are")

    factors = config.get("rope_freq_factors")
    if factors is not None:
        if kind == "llama3":
            raise ValueError("rope_freq_factors and rope type 'llama3' scale twice: give one")
        if not isinstance(factors, list):
            raise ValueError(f"rope_freq_factors {factors!r} must be a list of numbers")
        if len(factors) != head_dim // 2:
            raise ValueError(
                f"rope_freq_factors has {len(factors)} entries, but head_dim {head_dim} needs "
                f"{head_dim // 2}"
            )
        numbers = dict(enumerate(factors))
        factors = [_positive(numbers, index, "rope_freq_factors entry") for index in numbers]
        inv_freq /= torch.tensor(factors, dtype=torch.float32)
    return Rope(inv_freq, interleaved)


def _parameters(config: dict[str, Any]) -> dict[str, Any]:
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise ValueError("the config has both rope_parameters and rope_scaling, and they differ")
    parameters = new or old or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters must be an object, not {parameters!r}")
    for key, value in parameters.items():
        if isinstance(value, dict):
            raise ValueError(f"rope parameters per layer type ({key!r}) are not supported")
    return parameters


def _positive(parameters: Mapping[Any, Any], key: object, what: str = "rope") -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"{what} {key} {value!r} must be a positive number, below 1e30")
    return float(value)


def _llama3(inv_freq: torch.Tensor, parameters: dict[str, Any], length: float) -> torch.Tensor:
    """Llama 3.1's scaling: wavelengths over ``length / low_freq_factor`` positions are stretched by
    ``factor``, those under ``length / high_freq_factor`` kept, and those between interpolated."""
    factor = _positive(parameters, "factor")
    low = _positive(parameters, "low_freq_factor")
    high = _positive(parameters, "high_freq_factor")
    if high < low:
        raise ValueError(f"rope high_freq_factor {high} must not be below low_freq_factor {low}")
    wavelength = 2 * math.pi / inv_freq
    scaled = inv_freq / factor
    if high == low:  # Llama 4 Scout: nothing lies between
        return torch.where(wavelength > length / low, scaled, inv_freq)
    smooth = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    between = (1 - smooth) * scaled + smooth * inv_freq
    return torch.where(smooth >= 1, inv_freq, torch.where(smooth <= 0, scaled, between))
