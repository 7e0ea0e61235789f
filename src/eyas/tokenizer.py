"""Text to token ids and back, in one piece or token by token."""

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from eyas.chat_template import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders whose output for a token depends on nothing to its right, but for runs of byte tokens.
_PIECEWISE = {"ByteFallback", "Fuse", "Replace", "Strip", "Metaspace", "WordPiece"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """Wraps a ``tokenizers.Tokenizer`` with what a model's files say about its special tokens.

    Decoding never "cleans up" spaces before punctuation, as transformers does for some old
    tokenizers: that would make the text so far depend on the text to come.

    Attributes: ``vocab_size`` counts all tokens, added ones too; ``eos_token_ids`` are those that
    end a turn or a text; ``bos_token_id`` is None if there is none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
        chat_template: str | None,
        template_tokens: dict[str, str],
    ) -> None:
        """``template_tokens`` are the variables (bos_token, eos_token, ...) for chat templates.
        ValueError if the backend's decoder can't be streamed."""
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self._backend = backend
        self._special_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        kinds = _decoder_kinds(backend)
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        self._byte_values = _byte_values()
        self._template = None if chat_template is None else ChatTemplate(chat_template)
        self._template_tokens = template_tokens
        self._anchor = [] if self._byte_level else self._find_anchor()

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face directory. ValueError if it has none that can be used.
        Runs no code from the directory."""
        if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
            raise ValueError(f"{directory} has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
        import transformers  # slow to import, and needed for these directories alone

        try:
            loaded = transformers.AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=False, use_fast=True, local_files_only=True
            )
        except Exception as error:  # of many kinds, for files that are damaged or unknown
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"cannot load the tokenizer in {directory}: {reason}") from error
        if not loaded.is_fast:
            raise ValueError(f"{directory} has only a slow tokenizer: add its tokenizer.json")
        template = loaded.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        tokens = {k: v for k, v in loaded.special_tokens_map.items() if isinstance(v, str)}
        return cls(
            loaded.backend_tokenizer,
            eos_token_ids=_eos_token_ids(directory, loaded.eos_token_id),
            bos_token_id=loaded.bos_token_id,
            chat_template=template,
            template_tokens=tokens,
        )

    def save(self, directory: Path) -> None:
        """Writes the files that ``from_directory`` reads."""
        self._backend.save(str(directory / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._template_tokens,
        }
        if self._template is not None:
            settings["chat_template"] = self._template.text
        ends = {"eos_token_id": list(self.eos_token_ids)}
        for name, content in (("tokenizer_config", settings), ("generation_config", ends)):
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (directory / f"{name}.json").write_text(text, encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds what the model's files put around a
        text (often BOS). Special tokens written out in the text become their ids."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token's text as it would stand within a text: with its leading space if it has one;
        U+FFFD for part of a character; "" for an id beyond the vocabulary."""
        if self._byte_level:
            return self.token_bytes(token_id).decode("utf-8", errors="replace")
        return self.decode_after_text([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_vars: Any,
    ) -> str:
        """Renders a conversation, by ``chat_template`` if given, else by the model's own.

        ``continue_final_message`` ends the text within the last message, for the model to go on.
        ValueError if there is no template, or if it fails or raises.
        """
        template = self._template if chat_template is None else ChatTemplate(chat_template)
        if template is None:
            raise ValueError("this model has no chat template: pass one as chat_template")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._template_tokens, **template_vars},
        )

    # What IncrementalDecoder needs.

    def is_byte_level(self) -> bool:
        """Whether a text is the concatenated bytes of its tokens, and nothing else."""
        return self._byte_level

    def shows(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether a token takes part in decoding: ids beyond the vocabulary never do."""
        if token_id in self._special_ids:
            return not skip_special_tokens
        return self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes, in a byte-level vocabulary; b"" for an id beyond it."""
        token = self._backend.id_to_token(token_id) or ""
        values = [self._byte_values.get(character) for character in token]
        # A token with any other character is an added one, and stands for itself.
        return token.encode() if None in values else bytes(v for v in values if v is not None)

    def byte_token_value(self, token_id: int) -> int | None:
        """The byte of a token written as <0xHH>, in a vocabulary with byte fallback, else None."""
        if not self._byte_fallback:
            return None
        match = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        return None if match is None else int(match.group(1), 16)

    def decode_after_text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ``ids`` when some text precedes them: a leading space then stays."""
        before = self.decode(self._anchor)
        after = self.decode([*self._anchor, *ids], skip_special_tokens)
        assert after.startswith(before), (before, after)
        return after[len(before) :]

    def _find_anchor(self) -> list[int]:
        """Some token that shows as text, to decode others behind."""
        for token_id in range(self.vocab_size):
            if self.byte_token_value(token_id) is None and self.decode([token_id]):
                return [token_id]
        raise ValueError("the tokenizer has no token that shows as text")


class IncrementalDecoder:
    """Turns output tokens into text as they come, each character as soon as it is final.

    All the pieces together are what ``decode(prompt + output)`` has after the prompt's text; an
    unfinished character at the prompt's end belongs to the output. Constant time per token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        stream = _ByteStream if tokenizer.is_byte_level() else _PieceStream
        self._stream: _Stream = stream(tokenizer, prompt_token_ids, skip_special_tokens)

    def push(self, token_id: int) -> str:
        """Text that is now final; "" while a character is incomplete."""
        if not self._tokenizer.shows(token_id, self._skip):
            return ""
        return self._stream.push(token_id)

    def finish(self) -> str:
        """What is still held back: incomplete bytes, as U+FFFD."""
        return self._stream.finish()


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteStream:
    """Byte-level vocabularies: UTF-8, decoded as the bytes come."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # An unfinished character is 3 bytes at most, so the last 4 tell whether there is one.
        tail = b""
        for token_id in reversed(prompt):
            if tokenizer.shows(token_id, skip):
                tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 4:
                break
        self._utf8.decode(tail)

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceStream:
    """SentencePiece-like vocabularies: a token's text depends on whether any text precedes it, and
    a run of byte tokens is one unit (if its bytes aren't UTF-8, each becomes U+FFFD)."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._run: list[int] = []  # byte tokens held back
        start = len(prompt)
        while start and (self._is_byte(prompt[start - 1]) or not self._shows(prompt[start - 1])):
            start -= 1
            if self._is_byte(prompt[start]):
                self._run.insert(0, prompt[start])
        # The tokens so far while they show no text at all, else None.
        self._textless = self._without_text(prompt[:start])
        self._shown = self._finished_characters()  # of the run's text: the prompt's

    def push(self, token_id: int) -> str:
        if self._is_byte(token_id):
            self._run.append(token_id)
            return ""
        return self._flush([token_id])

    def finish(self) -> str:
        return self._flush([])

    def _flush(self, more: list[int]) -> str:
        ids = [*self._run, *more]
        text = self._text(ids)
        shown, self._run, self._shown = self._shown, [], 0
        if self._textless is not None:
            self._textless = None if text else [*self._textless, *ids]
        return text[shown:]

    def _text(self, ids: list[int]) -> str:
        if self._textless is None:
            return self._tokenizer.decode_after_text(ids, self._skip)
        return self._tokenizer.decode([*self._textless, *ids], self._skip)

    def _is_byte(self, token_id: int) -> bool:
        return self._tokenizer.byte_token_value(token_id) is not None

    def _shows(self, token_id: int) -> bool:
        return self._tokenizer.shows(token_id, self._skip)

    def _without_text(self, ids: Sequence[int]) -> list[int] | None:
        """``ids`` if they show no text, else None. A suffix that shows text settles it."""
        length = 1
        while length < len(ids):
            if self._tokenizer.decode(ids[-length:], self._skip):
                return None
            length *= 2
        return None if self._tokenizer.decode(ids, self._skip) else list(ids)

    def _finished_characters(self) -> int:
        """How many characters of the run's text are the prompt's: all, but for an unfinished one
        at its end."""
        values = bytes(self._tokenizer.byte_token_value(i) or 0 for i in self._run)
        finished = len(self._run)
        try:
            values.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.end == len(values) and error.reason == "unexpected end of data":
                finished = error.start
        return len(self._text(self._run[:finished]))


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """The steps of the decoder. ValueError unless they are ByteLevel alone, or all piecewise."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [str(step["type"]) for step in steps]
    if kinds != ["ByteLevel"] and not _PIECEWISE.issuperset(kinds):
        raise ValueError(f"tokenizers with the decoder {' + '.join(kinds)} are not supported")
    return kinds


def _byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's table: printable
    Latin-1 characters stand for themselves, the other bytes for U+0100 and up, in order)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in shown]
    return {chr(v): v for v in shown} | {chr(256 + n): v for n, v in enumerate(hidden)}


def _eos_token_ids(directory: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own EOS, then those of generation_config.json, or of config.json if there
    is none."""
    ids: list[int] = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            try:
                stored = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path} is not a JSON object: {error}") from error
            ids += stored if isinstance(stored, list) else [] if stored is None else [stored]
            break
    if not all(type(i) is int for i in ids):
        raise ValueError(f"{directory}: eos_token_id must be an integer or a list of them: {ids}")
    return tuple(dict.fromkeys(ids))
