"""What users hand in: prompts in their several forms, checked before anything else happens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from eyas.sampling.params import SamplingParams, bad_word_ids
from eyas.sampling.rules import SamplingRules
from eyas.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """``text`` is None if only token ids were given."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputReader:
    """Reads requests for a model with these limits; ``tokenizer`` None takes token ids only."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def prompt(self, prompt: Prompt, truncate_prompt_tokens: int | None = None) -> CheckedPrompt:
        """Checks a text, a sequence of token ids, or a dict with ``prompt``, ``prompt_token_ids``
        or both (the ids count, the text is only reported).

        ``truncate_prompt_tokens`` keeps that many of the last tokens; -1 as many as leave room for
        one output token; None refuses a prompt that is too long. ValueError says what is wrong.
        """
        text, ids = self._parts(prompt)
        token_ids = self._encode(text) if ids is None else ids
        checked = tuple(self._token_id(token, i) for i, token in enumerate(token_ids))
        checked = self._truncate(checked, truncate_prompt_tokens)
        if not checked:
            raise ValueError("the prompt is empty: give at least one token")
        longest = self.max_model_len - 1
        if len(checked) > longest:
            raise ValueError(
                f"the prompt has {len(checked)} tokens, but max_model_len={self.max_model_len} "
                f"leaves room for {longest}: shorten it, or set truncate_prompt_tokens"
            )
        return CheckedPrompt(text, checked)

    def rules(self, params: SamplingParams) -> SamplingRules:
        """The worker's view of ``params``. ValueError for what this engine can't do."""
        if self.tokenizer is None:
            if params.detokenize:
                raise ValueError("this engine has no tokenizer: set detokenize=False")
            if params.bad_words:
                raise ValueError("bad_words need a tokenizer, and this engine has none")
            return params.rules(self.eos_token_ids, (), self.vocab_size)
        tokenizer = self.tokenizer
        bad_words = bad_word_ids(
            params.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
        return params.rules(self.eos_token_ids, bad_words, self.vocab_size)

    def _parts(self, prompt: Prompt) -> tuple[str | None, Sequence[object] | None]:
        """A prompt's text and token ids; at least one of them is not None."""
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in _PROMPT_KEYS:
                    raise ValueError(f"unknown prompt key {key!r}: use {' or '.join(_PROMPT_KEYS)}")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise ValueError(f"'prompt' is a {type(text).__name__}: it must be a string")
            if ids is not None and not _is_sequence(ids):
                raise ValueError(
                    f"'prompt_token_ids' is a {type(ids).__name__}: it must be a list of integers"
                )
            if text is None and ids is None:
                raise ValueError("the prompt has neither 'prompt' nor 'prompt_token_ids'")
            return text, ids
        if isinstance(prompt, str):
            return prompt, None
        if _is_sequence(prompt):
            return None, prompt
        raise ValueError(
            f"the prompt is a {type(prompt).__name__}: "
            "it must be a string, a list of token ids, or a dict with one of them"
        )

    def _encode(self, text: str | None) -> list[int]:
        assert text is not None
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer: give prompt_token_ids, not text")
        return self.tokenizer.encode(text)

    def _token_id(self, token: object, position: int) -> int:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(f"token id {token!r} at prompt position {position} is not an integer")
        token_id = int(token)
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"token id {token_id} at prompt position {position} is outside the vocabulary of "
                f"{self.vocab_size} tokens"
            )
        return token_id

    def _truncate(self, token_ids: tuple[int, ...], count: int | None) -> tuple[int, ...]:
        if count is None:
            return token_ids
        if isinstance(count, bool) or not isinstance(count, int) or (count < 1 and count != -1):
            raise ValueError(
                f"truncate_prompt_tokens is {count!r}: "
                "it must be a positive integer, -1 for as many as fit, or None"
            )
        return token_ids[-(self.max_model_len - 1 if count == -1 else count) :]


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
