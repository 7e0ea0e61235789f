"""GGUF vocabularies against brute-force tokenizers written from the algorithms' descriptions."""

import functools
import itertools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
from checkpoints import tiny_vocabulary
from hypothesis import assume, given
from hypothesis import strategies as st

from eyas.loading.checkpoint import load_tokenizer
from eyas.loading.gguf import GGUFFile
from eyas.loading.gguf_tokenizer import read_tokenizer
from eyas.tokenizer import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = st.text(
    st.sampled_from("etao inTHE'sLL0123456789\n\r\t.,!/é木한🤖е\u0301ǅ")
    | st.characters(codec="utf-8")
)
SPACE = "\u2581"


def write_vocabulary(path: Path, model: str, **metadata: Any) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def byte_level(path: Path, pre: str, **metadata: Any) -> Tokenizer:
    tokens, merges = tiny_vocabulary(500)
    settings: dict[str, Any] = {
        "tokenizer_pre": pre,
        "token_list": tokens,
        "token_types": [3] * 4 + [1] * (len(tokens) - 4),
        "token_merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }
    settings.update(metadata)
    settings = {key: value for key, value in settings.items() if value is not None}
    return read_tokenizer(write_vocabulary(path / "m.gguf", "gpt2", **settings))


def merge_by_rank(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """BPE (Sennrich et al. 2016): again and again the lowest-ranked pair, leftmost first."""
    parts = list(word)
    while True:
        pairs = [(ranks[p], i) for i, p in enumerate(itertools.pairwise(parts)) if p in ranks]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@functools.cache
def demo() -> Tokenizer:
    return load_tokenizer("demo")


@functools.cache
def demo_tables() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    from eyas.loading.checkpoint import _demo_path

    file = GGUFFile(_demo_path())
    tokens = {token: i for i, token in enumerate(file.strings("tokenizer.ggml.tokens"))}
    merges = [tuple(m.split(" ")) for m in file.strings("tokenizer.ggml.merges")]
    return tokens, {merge: rank for rank, merge in enumerate(merges)}  # type: ignore[misc]


def byte_characters(text: str) -> str:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return "".join(chr(b) if b in shown else chr(256 + hidden.index(b)) for b in text.encode())


def words(text: str, *patterns: str) -> list[str]:
    """Splits by each pattern in turn; what no match covers is a word too."""
    pieces = [text]
    for pattern in patterns:
        split = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                split += [piece[end : match.start()], match.group()]
                end = match.end()
            split.append(piece[end:])
        pieces = [piece for piece in split if piece]
    return pieces


@given(TEXTS)
def test_demo_agrees_with_brute_force(text: str) -> None:
    tokens, ranks = demo_tables()
    # The vocabulary lacks 21 bytes that its training text never had: they have no id at all.
    text = "".join(c for c in text if all(b in tokens for b in byte_characters(c)))
    assume(not any(token in text for token in list(tokens)[:17]))  # special tokens: see below
    expected = [
        tokens[part]
        for word in words(text, r"\p{N}", GPT2)
        for part in merge_by_rank(byte_characters(word), ranks)
    ]
    assert demo().encode(text) == expected
    assert demo().decode(expected) == text


def test_demo_facts() -> None:
    """SmolLM2's chat format: one id per marker, digits one by one."""
    tokenizer = demo()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert ids[:3] == [1, 9690, 198]  # <|im_start|>, system, newline
    assert len(tokenizer.encode("31415")) == 5
    assert tokenizer.decode([1, 9690, 2]) == "system"
    assert (
        tokenizer.decode([1, 9690, 2], skip_special_tokens=False) == "<|im_start|>system<|im_end|>"
    )


# Word splits worked out by hand from the patterns in the models' tokenizer.json files.
SPLITS = {
    "gpt-2": ["HE", "'", "LL", " 12345", "\n", " at"],
    "llama-bpe": ["HE", "'LL", " ", "123", "45", "\n", " at"],
    "llama4": ["HE'LL", " ", "123", "45", "\n", " at"],
    "qwen2": ["HE", "'LL", " ", "1", "2", "3", "4", "5", "\n", " at"],
    "tekken": ["HE", "'LL", " ", "1", "2", "3", "4", "5", "\n", " at"],
    "smollm": ["HE", "'", "LL", " ", "1", "2", "3", "4", "5", "\n", " at"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_splits_into_words_as_the_model_does(tmp_path: Path, pre: str) -> None:
    backend = byte_level(tmp_path, pre)._backend
    text = "HE'LL 12345\n at"
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in spans] == SPLITS[pre]


@pytest.mark.parametrize("pre", ["tekken", "llama4"])
def test_splits_at_capitals(tmp_path: Path, pre: str) -> None:
    backend = byte_level(tmp_path, pre)._backend
    text = "camelCase HTMLPage"
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == ["camel", "Case", " HTMLPage"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    plain = byte_level(tmp_path, "llama-bpe")
    assert plain.encode("e\u0301") != plain.encode("\u00e9")


def test_adds_bos_and_eos_when_told(tmp_path: Path) -> None:
    bare = byte_level(tmp_path, "gpt-2").encode("at")
    assert byte_level(tmp_path, "gpt-2", add_bos_token=True).encode("at") == [0, *bare]
    both = byte_level(tmp_path, "gpt-2", add_bos_token=True, add_eos_token=True)
    assert both.encode("at") == [0, *bare, 1]
    assert both.encode("at", add_special_tokens=False) == bare
    assert byte_level(tmp_path, "llama-bpe", add_bos_token=None).encode("at") == [0, *bare]
    assert byte_level(tmp_path, "gpt-2", add_bos_token=None).encode("at") == bare


def test_ends_of_turn_are_eos_too(tmp_path: Path) -> None:
    assert byte_level(tmp_path, "gpt-2", eot_token_id=3).eos_token_ids == (1, 3)
    assert byte_level(tmp_path, "gpt-2", eot_token_id=1).eos_token_ids == (1,)


def test_user_defined_tokens_are_matched_but_not_special(tmp_path: Path) -> None:
    tokens, _ = tiny_vocabulary(500)
    tokens.append("<tool>")
    types = [3] * 4 + [1] * 496 + [4]
    tokenizer = byte_level(tmp_path, "gpt-2", token_list=tokens, token_types=types)
    assert tokenizer.encode("a<tool>")[1:] == [500]
    assert tokenizer.decode([500, 0]) == "<tool>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"pre": "martian"},
            "tokenizer.ggml.pre = 'martian' is unknown; known: .*smollm",
        ),
        ({"pre": "gpt-2", "tokenizer_pre": None}, "lacks the metadata tokenizer.ggml.pre"),
        ({"token_list": ["a", "a"]}, "holds a token twice"),
        ({"token_types": [1]}, "token_type has 1 entries for 500 tokens"),
        ({"token_merges": ["a zzz"]}, "merges holds 'a zzz'"),
        ({"eos_token_id": 500}, "eos_token_id is 500, but there are 500 tokens"),
    ],
)
def test_refuses_bad_vocabularies(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    settings = {"pre": "gpt-2", **metadata}
    with pytest.raises(ValueError, match=message):
        byte_level(tmp_path, **settings)


def test_refuses_other_kinds_of_tokenizer(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "m.gguf", "bert", token_list=["a"])
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model = 'bert' is not gpt2 or llama"):
        read_tokenizer(file)


def sentencepiece_tables() -> tuple[list[str], list[float], list[int]]:
    """A small SentencePiece vocabulary: 3 control-like tokens, 256 bytes, then scored pieces."""
    pieces = [SPACE + "the", "the", "he", "th", SPACE + "t", "in", SPACE * 2, "at", "an", "on"]
    pieces += [SPACE + "th", "ei", "ea", *(SPACE + "thaeinot")]
    pieces = list(dict.fromkeys(pieces))
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return tokens, scores, [2, 3, 3, *[6] * 256, *[1] * len(pieces)]


def sentencepiece(path: Path, **metadata: Any) -> Tokenizer:
    tokens, scores, types = sentencepiece_tables()
    settings: dict[str, Any] = {
        "token_list": tokens,
        "token_scores": scores,
        "token_types": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    settings.update(metadata)
    return read_tokenizer(write_vocabulary(path / "m.gguf", "llama", **settings))


def merge_by_score(text: str) -> list[int]:
    """SentencePiece's BPE: again and again the pair whose result scores highest."""
    tokens, scores, _ = sentencepiece_tables()
    best = {token: score for token, score in zip(tokens[259:], scores[259:], strict=True)}
    parts = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (-best[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in best
        ]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [tokens.index(part)] if part in best else [3 + byte for byte in part.encode()]
    return ids


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("spm"))


@given(text=st.text(st.sampled_from("thaeino z木🤖\n")))
def test_sentencepiece_agrees_with_brute_force(spm: Tokenizer, text: str) -> None:
    expected = merge_by_score(" " + text) if text else []
    assert spm.encode(text) == [1, *expected]
    assert spm.decode([1, *expected]) == text


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("the z") == merge_by_score("the z")
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_token_text_keeps_the_leading_space(spm: Tokenizer) -> None:
    tokens = sentencepiece_tables()[0]
    assert spm.token_text(tokens.index(SPACE + "the")) == " the"
    assert spm.token_text(tokens.index("the")) == "the"
    assert spm.token_text(2) == "</s>"
    assert spm.token_text(3 + 0x41) == "A"
    assert spm.token_text(3 + 0xE6) == "\ufffd"
