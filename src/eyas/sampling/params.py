"""SamplingParams: what a user asks of one request, with vLLM's names, defaults and meanings."""

import contextlib
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real

from eyas.sampling.rules import SamplingRules

_MAX_N = 16384  # vLLM's limit
_MAX_BIAS = 100  # the OpenAI API's limit

# Keywords that work in vLLM, now or in earlier versions, and that Eyas does not have.
_ONLY_IN_VLLM = frozenset(
    {
        "best_of",
        "early_stopping",
        "extra_args",
        "flat_logprobs",
        "guided_decoding",
        "length_penalty",
        "logits_processors",
        "logprob_token_ids",
        "output_kind",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "repetition_detection",
        "routed_experts_prompt_start",
        "skip_clone",
        "skip_reading_prefix_cache",
        "spaces_between_special_tokens",
        "stream_interval",
        "structured_outputs",
        "thinking_token_budget",
        "trace_decode_token_ids",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How to sample one request. Keywords only; ValueError for an unknown or impossible one.

    To change one, use ``dataclasses.replace``.

    n: how many independent samples; must be 1 at temperature 0.
    presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logits of tokens that
        occur in the output, once or per occurrence.
    repetition_penalty: above 0; divides (or, if negative, multiplies) the logits of tokens that
        occur in the prompt or output.
    temperature: 0 is greedy. Any value above 0 is honoured as it is (vLLM raises those below 0.01
        to 0.01).
    top_p: in (0, 1]; keep the smallest set of most probable tokens that reaches it.
    top_k: keep that many tokens; 0 or -1 is off.
    min_p: in [0, 1]; keep tokens at least this probable, relative to the most probable one.
    seed: 64 bits, signed; None or, as in vLLM, -1: the engine chooses one.
    stop: strings that end the output; not part of it unless include_stop_str_in_output.
    stop_token_ids: tokens that end the output.
    ignore_eos: the model's end-of-sequence tokens don't end the output.
    max_tokens: output tokens at most; None: until the context is full.
    min_tokens: output tokens before an end-of-sequence or stop token may come.
    logprobs, prompt_logprobs: how many of the most probable tokens to report at each position,
        beside the token itself; -1: the whole vocabulary; None: no report.
    detokenize, skip_special_tokens: how the output becomes text.
    logit_bias: token id -> number in [-100, 100] that is added to its logit.
    allowed_token_ids: only these can be sampled.
    bad_words: words that can't be completed in the output.
    num_speculative_tokens: drafts per step (only Eyas has this); None: the engine's setting,
        0: none. It never changes the output, unless acceptance is "rejection".
    """

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool
    skip_special_tokens: bool
    logit_bias: dict[int, float]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    num_speculative_tokens: int | None

    def __init__(
        self,
        *,
        n: int = 1,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[str] | None = None,
        num_speculative_tokens: int | None = None,
        **unknown: object,
    ) -> None:
        for name in unknown:
            raise ValueError(_unknown_keyword(name))
        values = {
            "n": _integer("n", n, 1, _MAX_N),
            "presence_penalty": _number("presence_penalty", presence_penalty, -2, 2),
            "frequency_penalty": _number("frequency_penalty", frequency_penalty, -2, 2),
            "repetition_penalty": _positive("repetition_penalty", repetition_penalty),
            "temperature": _number("temperature", temperature, 0),
            "top_p": _positive("top_p", top_p, 1),
            "top_k": max(_integer("top_k", top_k, -1), 0),
            "min_p": _number("min_p", min_p, 0, 1),
            "seed": _optional_integer("seed", seed, -(2**63), 2**63 - 1),
            "stop": _strings("stop", (stop,) if isinstance(stop, str) else stop),
            "stop_token_ids": _token_ids("stop_token_ids", stop_token_ids) or (),
            "include_stop_str_in_output": _flag(
                "include_stop_str_in_output", include_stop_str_in_output
            ),
            "ignore_eos": _flag("ignore_eos", ignore_eos),
            "max_tokens": _optional_integer("max_tokens", max_tokens, 1),
            "min_tokens": _integer("min_tokens", min_tokens, 0),
            "logprobs": _optional_integer("logprobs", logprobs, -1),
            "prompt_logprobs": _optional_integer("prompt_logprobs", prompt_logprobs, -1),
            "detokenize": _flag("detokenize", detokenize),
            "skip_special_tokens": _flag("skip_special_tokens", skip_special_tokens),
            "logit_bias": _biases(logit_bias),
            "allowed_token_ids": _token_ids("allowed_token_ids", allowed_token_ids),
            "bad_words": _strings("bad_words", bad_words),
            "num_speculative_tokens": _optional_integer(
                "num_speculative_tokens", num_speculative_tokens, 0
            ),
        }
        if values["seed"] == -1:
            values["seed"] = None
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
        self._check_together()

    def _check_together(self) -> None:
        """What no parameter shows alone."""
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n must be 1 when using greedy sampling, got n={self.n} with temperature=0"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                "min_tokens must be at most max_tokens, "
                f"got min_tokens={self.min_tokens} with max_tokens={self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop={list(self.stop)} needs detokenize=True: stop strings are found in the text"
            )
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must not be empty: nothing could be sampled")

    def rules(
        self,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> SamplingRules:
        """The rules for a model with these end-of-sequence tokens and this vocabulary.

        ``bad_words`` are the token ids of ``self.bad_words`` (see ``bad_word_ids``). ValueError for
        a token id outside the vocabulary, or if no token could be sampled.
        """
        assert bool(bad_words) == bool(self.bad_words), "bad_words were not tokenised"
        stop_ids = (
            self.stop_token_ids if self.ignore_eos else (*eos_token_ids, *self.stop_token_ids)
        )
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("end-of-sequence ids", stop_ids),
            ("bad_words", [token for word in bad_words for token in word]),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{name}: token id {token} is outside the vocabulary of {vocab_size} tokens"
                    )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise ValueError(
                    f"{name}={count} exceeds the vocabulary of {vocab_size} tokens: "
                    "use -1 for all of them"
                )
        never = {word[0] for word in bad_words if len(word) == 1}
        if self.min_tokens > 0:
            never.update(stop_ids)
        allowed = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if len(never) >= len(allowed) and never.issuperset(allowed):
            raise ValueError(
                "no token is left to sample: allowed_token_ids, bad_words and min_tokens "
                f"(={self.min_tokens}) exclude all {vocab_size} of the vocabulary"
            )
        return SamplingRules(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            allowed_token_ids=self.allowed_token_ids,
            bad_words=tuple(tuple(word) for word in bad_words),
            min_tokens=self.min_tokens,
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def bad_word_ids(
    words: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token ids of bad words, at the start of a text and, as in vLLM, after a space too if that
    only exchanges the first token. ``encode`` must not add special tokens.

    ValueError for a word without tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        if not plain:
            raise ValueError(f"bad_words: {word!r} has no tokens")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def _unknown_keyword(name: str) -> str:
    if name in _ONLY_IN_VLLM:
        return f"SamplingParams: {name!r} exists in vLLM but not in Eyas"
    close = difflib.get_close_matches(name, [field.name for field in fields(SamplingParams)], 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"SamplingParams: unknown parameter {name!r}{hint}"


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _integer(name: str, value: object, low: int, high: float = math.inf) -> int:
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or not low <= number <= high:
        between = f"of at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be an integer {between}, got {value!r}")
    return number


def _optional_integer(name: str, value: object, low: int, high: float = math.inf) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _number(name: str, value: object, low: float, high: float = math.inf) -> float:
    number = _finite(name, value)
    if not low <= number <= high:
        between = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {between}, got {value!r}")
    return number


def _positive(name: str, value: object, high: float = math.inf) -> float:
    number = _finite(name, value)
    if not 0 < number <= high:
        between = "above 0" if high == math.inf else f"in (0, {high}]"
        raise ValueError(f"{name} must be {between}, got {value!r}")
    return number


def _finite(name: str, value: object) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} must be a list of strings, got {value!r}")
    if "" in value:
        raise ValueError(f"{name} must not contain an empty string, got {value!r}")
    return tuple(dict.fromkeys(value))


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    """The ids without repetitions."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(dict.fromkeys(_integer(f"a token id in {name}", token, 0) for token in value))


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be a dict from token id to number, got {value!r}")
    return {
        _integer("a token id in logit_bias", token, 0): _number(
            f"logit_bias of token {token}", bias, -_MAX_BIAS, _MAX_BIAS
        )
        for token, bias in value.items()
    }
