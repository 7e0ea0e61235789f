"""SamplingRules: SamplingParams after the tokenizer was asked; numbers only, for the worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """What decides the next token of a request, besides logits, seed and prefix.

    ``bad_words`` are token-id sequences. ``stop_ids`` (end-of-sequence ids unless ignored, and
    ``stop_token_ids``) are masked until ``min_tokens`` output tokens exist. ``logprobs`` and
    ``prompt_logprobs`` are how many top entries to report beside the token itself (None: no
    report; -1: the whole vocabulary). ``temperature`` 0 is arg-max; ``top_k`` 0 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
