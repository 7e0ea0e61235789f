"""The tokenizer in a GGUF file's metadata.

Two kinds exist in the Llama family: byte-level BPE with merges ("gpt2") and SentencePiece BPE with
scores and byte fallback ("llama"). Both become a ``tokenizers.Tokenizer``, built as Hugging Face's
own conversions of the same models build it.
"""

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from eyas.loading.gguf import GGUFFile
from eyas.tokenizer import Tokenizer

# Token types of the format (tokenizer.ggml.token_type).
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_SPACE = "\u2581"  # SentencePiece's visible space


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """ValueError, naming the metadata at fault, for a vocabulary that can't be used."""
    vocabulary = _Vocabulary(file)
    model = file.string("tokenizer.ggml.model")
    if model == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise ValueError(f"{file.path}: tokenizer.ggml.model = {model!r} is not gpt2 or llama")
    vocabulary.add_marked_tokens(backend)

    bos, eos = vocabulary.token_id("bos"), vocabulary.token_id("eos")
    leading = bos if file.flag("tokenizer.ggml.add_bos_token", adds_bos) else None
    trailing = eos if file.flag("tokenizer.ggml.add_eos_token", False) else None
    _add_ends(backend, vocabulary, leading, trailing)
    ends = (eos, vocabulary.token_id("eot"), vocabulary.token_id("eom"))
    template = "tokenizer.chat_template"
    return Tokenizer(
        backend,
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        bos_token_id=bos,
        chat_template=file.string(template) if template in file.metadata else None,
        template_tokens={
            f"{name}_token": vocabulary.tokens[i]
            for name, i in (("bos", bos), ("eos", eos))
            if i is not None
        },
    )


class _Vocabulary:
    """Tokens with their ids and types."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens = file.strings("tokenizer.ggml.tokens")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ValueError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
        if "tokenizer.ggml.token_type" in file.metadata:
            self.types: list[int] = file.numbers("tokenizer.ggml.token_type").tolist()
        else:
            self.types = [_NORMAL] * len(self.tokens)
        self._check_length("token_type", len(self.types))

    def scores(self) -> list[float]:
        scores: list[float] = self.file.numbers("tokenizer.ggml.scores").tolist()
        self._check_length("scores", len(scores))
        return scores

    def merges(self) -> list[tuple[str, str]]:
        merges = []
        if "tokenizer.ggml.merges" not in self.file.metadata:
            return []  # a vocabulary of single bytes
        for merge in self.file.strings("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if not (left in self.ids and right in self.ids and left + right in self.ids):
                raise ValueError(
                    f"{self.file.path}: tokenizer.ggml.merges holds {merge!r}, "
                    f"whose parts or result are not tokens"
                )
            merges.append((left, right))
        return merges

    def token_id(self, role: str) -> int | None:
        """The id that the metadata gives to a role (bos, eos, eot, eom, unknown)."""
        key = f"tokenizer.ggml.{role}_token_id"
        if key not in self.file.metadata:
            return None
        token_id = self.file.integer(key)
        if not 0 <= token_id < len(self.tokens):
            raise ValueError(
                f"{self.file.path}: {key} is {token_id}, but there are {len(self.tokens)} tokens"
            )
        return token_id

    def add_marked_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Control tokens become special ones; user-defined ones are only matched first."""
        marked = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
        backend.add_special_tokens([token for token in marked if token.special])
        backend.add_tokens([token for token in marked if not token.special])

    def _check_length(self, name: str, length: int) -> None:
        if length != len(self.tokens):
            raise ValueError(
                f"{self.file.path}: tokenizer.ggml.{name} has {length} entries "
                f"for {len(self.tokens)} tokens"
            )


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it puts BOS first when the metadata doesn't say."""
    file = vocabulary.file
    name = file.string("tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} is unknown; known: {', '.join(_SPLITS)}"
        )
    # Llama 3's, Llama 4's and Tekken's vocabularies come from tiktoken: a word that is a token is
    # that token, whether or not merges lead to it.
    from_tiktoken = name in ("llama-bpe", "llama3", "llama-v3", "llama4", "tekken")
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=from_tiktoken)
    )
    if name in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _SPLITS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend, from_tiktoken


def _split_by(pattern: str) -> Callable[[], Any]:
    def split() -> Any:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, to_bytes])

    return split


def _gpt2_split() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_split()])


# The patterns of the models' own tokenizer.json files.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _split_by(
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
)
_QWEN2_SPLIT = _split_by(
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
)
_LLAMA4_SPLIT = _split_by(  # GPT-4o's
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _TAIL
)
_TEKKEN_SPLIT = _split_by(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_SPLITS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama4": _LLAMA4_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair whose result scores highest is merged first."""
    unknown = vocabulary.token_id("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges_by_score(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    visible = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.file.flag("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), visible])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = visible
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == _NORMAL
    }
    scores = vocabulary.scores()
    ranked = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_ends(
    backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, bos: int | None, eos: int | None
) -> None:
    """Makes ``encode(add_special_tokens=True)`` put BOS first and EOS last."""
    # Named by role: the post-processor's little language can't spell every token.
    ends = {role: i for role, i in (("bos", bos), ("eos", eos)) if i is not None}
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(["bos"] if "bos" in ends else []), "$A", *(["eos"] if "eos" in ends else [])],
            special_tokens=[
                {"id": role, "ids": [i], "tokens": [vocabulary.tokens[i]]}
                for role, i in ends.items()
            ],
        )
