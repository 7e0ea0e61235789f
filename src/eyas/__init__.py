"""Eyas: speculative decoding that changes only the clock."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.llm import LLM
    from eyas.sampling.params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import torch and the engine only when they are asked for: ``eyas --help`` stays quick."""
    if name == "LLM":
        from eyas.llm import LLM

        return LLM
    if name == "SamplingParams":
        from eyas.sampling.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")
