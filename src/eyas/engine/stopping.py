"""Stop rules: where an output ends, and what its text is.

Tokens are taken one by one, so that it makes no difference how many a step brings.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from eyas.sampling.params import SamplingParams


class Decoder(Protocol):
    """What is needed of ``tokenizer.IncrementalDecoder``."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends an output. None but ``max_tokens`` applies to the first ``min_tokens`` tokens: a
    stop token does nothing there, and a stop string counts only if a later token completes it.

    ``max_tokens`` includes what max_model_len leaves room for. ``eos_token_ids`` is empty if the
    request ignores them.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    min_tokens: int
    max_tokens: int


def stop_rules(params: SamplingParams, eos_token_ids: tuple[int, ...], room: int) -> StopRules:
    """The stop rules of ``params``; ``room`` is max_model_len less the prompt's tokens."""
    return StopRules(
        eos_token_ids=frozenset(() if params.ignore_eos else eos_token_ids),
        stop_token_ids=frozenset(params.stop_token_ids),
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
    )


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended. ``stop_reason`` is the stop string or stop token; None for an
    end-of-sequence token, and for "length"."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


class OutputText:
    """One output's text as it grows, and the stop rules on it; ``decoder`` None makes no text.

    Of stop strings, the one that begins first in the text wins, then the one given first. What may
    be the beginning of one is held back: ``_pending`` is the longest end of the text that begins a
    stop string, so every match that a later token completes begins in it.
    """

    def __init__(self, rules: StopRules, decoder: Decoder | None) -> None:
        assert decoder is not None or not rules.stop, "stop strings need text"
        self.num_tokens = 0
        self._rules = rules
        self._decoder = decoder
        self._pieces: list[str] = []
        self._pending = ""

    @property
    def text(self) -> str:
        """What may be shown."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        shown = self._pieces[0] if self._pieces else ""
        # If a stop string is to be part of the text, so is its beginning.
        return shown + self._pending if self._rules.include_stop_str_in_output else shown

    def push(self, token_id: int) -> Finish | None:
        """Takes the next token; says whether the output ends with it."""
        rules = self._rules
        self.num_tokens += 1
        is_eos = token_id in rules.eos_token_ids
        is_stop = self.num_tokens > rules.min_tokens and (
            is_eos or token_id in rules.stop_token_ids
        )
        is_last = is_stop or self.num_tokens >= rules.max_tokens
        if self._decoder is not None:
            drop = is_stop and not rules.include_stop_str_in_output
            text = "" if drop else self._decoder.push(token_id)
            if is_last:
                text += self._decoder.finish()
            if (stop := self._take(text, is_last)) is not None:
                return Finish("stop", stop)
        if is_stop:
            return Finish("stop", None if is_eos else token_id)
        return Finish("length") if is_last else None

    def close(self) -> None:
        """Ends the text from outside (an abort): shows what was held back."""
        if self._decoder is not None:
            self._take(self._decoder.finish(), is_last=True)

    def _take(self, text: str, is_last: bool) -> str | None:
        """Appends ``text``; returns the stop string that it completes."""
        window, num_old = self._pending + text, len(self._pending)
        found = self._find(window, num_old) if self.num_tokens > self._rules.min_tokens else None
        if found is not None:
            start, stop = found
            end = start + len(stop) if self._rules.include_stop_str_in_output else start
            self._pieces.append(window[:end])
            self._pending = ""
            return stop
        num_held = 0 if is_last else self._num_held(window)
        self._pieces.append(window[: len(window) - num_held])
        self._pending = window[len(window) - num_held :]
        return None

    def _find(self, window: str, num_old: int) -> tuple[int, str] | None:
        """The first match that ends after the ``num_old`` first characters: its start and string.

        Earlier ends were looked at when their tokens came, and did not count.
        """
        best: tuple[int, str] | None = None
        for stop in self._rules.stop:
            start = window.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = start, stop
        return best

    def _num_held(self, window: str) -> int:
        """The length of the longest end of ``window`` that begins a stop string."""
        longest = 0
        for stop in self._rules.stop:
            for length in range(min(len(stop) - 1, len(window)), longest, -1):
                if window.endswith(stop[:length]):
                    longest = length
                    break
        return longest
