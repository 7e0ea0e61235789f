"""Encoding, chat templates and incremental decoding, against transformers and full decodes."""

import functools
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from checkpoints import CHAT_TEMPLATE, save_tiny_hf, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from eyas.loading.checkpoint import load_tokenizer
from eyas.tokenizer import IncrementalDecoder, Tokenizer

SPACE = "\u2581"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé <b>?"},
    {"role": "assistant", "content": " I think "},
]
GENERATION_TEMPLATE = (
    "{%- for m in messages %}\n  {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{%- else %}{{ m | tojson }}{{ eos_token }}{%- endif %}\n"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{% if tools is not none %}tools{% endif %}{% if flag %}flag{% endif %}"
)


@functools.cache
def demo() -> Tokenizer:
    return load_tokenizer("demo")


@functools.cache
def sentencepiece() -> Tokenizer:
    """A vocabulary like Llama 2's: special tokens, bytes, then pieces, some empty of text."""
    pieces = ["a", SPACE, SPACE + "b", SPACE * 2, "木", "�", "", "<0x4", "x" + SPACE]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{v:02X}>" for v in range(256)), *pieces]
    backend = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in tokens[:3]])
    return wrap(backend)


@functools.cache
def metaspace() -> Tokenizer:
    tokens = ["a", SPACE, SPACE + "b", "c" + SPACE, "<s>"]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return wrap(backend)


def wrap(backend: tokenizers.Tokenizer, **settings: Any) -> Tokenizer:
    defaults: dict[str, Any] = {
        "eos_token_ids": (2,),
        "bos_token_id": 1,
        "chat_template": None,
        "template_tokens": {},
    }
    return Tokenizer(backend, **{**defaults, **settings})


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    decoder = IncrementalDecoder(tokenizer, prompt, skip)
    return "".join([*(decoder.push(i) for i in output), decoder.finish()])


def demo_ids() -> st.SearchStrategy[list[int]]:
    """Any ids; and single bytes and special tokens often enough to meet."""
    byte_ids = [demo().encode(c)[-1] for c in "木🤖éa "]
    parts = sorted({i for c in "木🤖é한" for i in demo().encode(c)})
    return st.lists(
        st.integers(0, demo().vocab_size + 5)
        | st.integers(0, 300)
        | st.sampled_from([*byte_ids, *parts])
    )


@given(st.data(), st.booleans())
def test_stream_of_random_ids_is_the_full_decode(data: st.DataObject, skip: bool) -> None:
    output = data.draw(demo_ids())
    assert stream(demo(), [], output, skip) == demo().decode(output, skip)


@given(st.data(), st.booleans())
def test_stream_goes_on_where_the_prompt_ended(data: st.DataObject, skip: bool) -> None:
    prompt, output = data.draw(demo_ids()), data.draw(demo_ids())
    whole = demo().decode([*prompt, *output], skip)
    # Only an unfinished character at the prompt's end is not the prompt's own text.
    unfinished = IncrementalDecoder(demo(), prompt, skip).finish()
    own = demo().decode(prompt, skip).removesuffix(unfinished)
    assert whole.startswith(own)
    assert stream(demo(), prompt, output, skip) == whole[len(own) :]


@pytest.fixture(scope="module")
def all_bytes() -> Tokenizer:
    """A byte-level vocabulary that has every byte (the demo's lacks 21 rare ones)."""
    return wrap(tiny_tokenizer(500))


@given(before=st.text(), text=st.text())
def test_stream_of_unicode_text_is_the_text(all_bytes: Tokenizer, before: str, text: str) -> None:
    prompt, output = all_bytes.encode(before), all_bytes.encode(text)
    skip = False  # random text might spell a special token
    assert stream(all_bytes, prompt, output, skip) == text


@given(st.text())
def test_stream_of_demo_text_is_the_full_decode(text: str) -> None:
    output = demo().encode(text)
    assert stream(demo(), [], output, False) == demo().decode(output, False)


@pytest.mark.parametrize("text", ["木🤖 é", "a\u0301 👩‍👩‍👧", "naïve — 한국어 ไทย"])
def test_pieces_are_whole_characters(text: str) -> None:
    decoder = IncrementalDecoder(demo(), [])
    pieces = [decoder.push(i) for i in demo().encode(text)]
    assert "".join(pieces) == text
    assert decoder.finish() == ""
    assert all("\ufffd" not in piece for piece in pieces)


def test_incomplete_bytes_come_out_at_the_end() -> None:
    ids = demo().encode("a木")
    decoder = IncrementalDecoder(demo(), [])
    assert [decoder.push(i) for i in ids[:-1]] == ["a", *[""] * (len(ids) - 2)]
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("tokenizer", [sentencepiece, metaspace])
@given(data=st.data(), skip=st.booleans())
def test_piecewise_stream_is_the_full_decode(tokenizer: Any, data: Any, skip: bool) -> None:
    size = tokenizer().vocab_size
    some = st.integers(0, size) | st.integers(max(0, size - 10), size)
    byte_runs = st.sampled_from([[3 + b for b in c.encode()] for c in "木é🤖 "])
    units = (
        st.lists(some.map(lambda i: [i]) | byte_runs)
        if size > 200
        else st.lists(some.map(lambda i: [i]))
    )
    output = list(itertools.chain(*data.draw(units)))
    assert stream(tokenizer(), [], output, skip) == tokenizer().decode(output, skip)
    prompt = list(itertools.chain(*data.draw(units)))
    if any(tokenizer().byte_token_value(i) is not None for i in prompt[-5:]):
        return  # a run of bytes that crosses the prompt's end is tested below
    whole = tokenizer().decode([*prompt, *output], skip)
    own = tokenizer().decode(prompt, skip)
    assert stream(tokenizer(), prompt, output, skip) == whole[len(own) :]


def test_byte_runs_across_the_prompts_end() -> None:
    tokenizer = sentencepiece()
    tree, letter = [3 + b for b in "木".encode()], tokenizer.encode("a", add_special_tokens=False)
    assert stream(tokenizer, [*letter, *tree], letter, True) == "a"
    assert stream(tokenizer, [*letter, *tree], tree, True) == "木"
    assert stream(tokenizer, [*letter, *tree, *tree[:2]], tree[2:], True) == "木"
    assert stream(tokenizer, tree[:1], [*tree[1:], *letter], True) == "木a"


def test_leading_space_is_kept_after_text_alone() -> None:
    tokenizer = sentencepiece()
    b = 3 + 256 + 2  # SPACE + "b"
    assert stream(tokenizer, [1], [b, b], True) == "b b"
    assert stream(tokenizer, [1, b], [b], True) == " b"


@pytest.mark.parametrize("tokenizer", [demo, sentencepiece])
def test_time_per_token_does_not_grow(tokenizer: Any) -> None:
    """A long invalid run is the worst case for decoders that retry from its start."""
    bad = demo().encode("木")[-1] if tokenizer is demo else 3 + 0xE6

    def seconds(count: int) -> float:
        decoder = IncrementalDecoder(tokenizer(), [])
        start = time.process_time()
        for _ in range(count):
            decoder.push(bad)
        decoder.finish()
        return time.process_time() - start

    seconds(100)
    assert seconds(40_000) < 60 * max(seconds(4_000), 0.002)


def test_token_text() -> None:
    tokenizer = demo()
    ids = tokenizer.encode(" the 木<|im_end|>")
    assert tokenizer.token_text(ids[0]) == " the"
    assert tokenizer.token_text(ids[-1]) == "<|im_end|>"
    assert tokenizer.token_text(tokenizer.encode("木")[0]) == "\ufffd"
    assert tokenizer.token_text(10**6) == ""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        demo().encode("ab\ud800")


def test_refuses_decoders_that_cannot_be_streamed() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match="decoder CTC are not supported"):
        wrap(backend)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_hf(tmp_path_factory.mktemp("hf"))


@given(text=st.text())
def test_directory_tokenizer_is_that_of_transformers(directory: Path, text: str) -> None:
    ours, theirs = both(directory)
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@functools.cache
def both(directory: Path) -> tuple[Tokenizer, Any]:
    return load_tokenizer(str(directory)), transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE, GENERATION_TEMPLATE])
@pytest.mark.parametrize("mode", [(True, False), (False, False), (False, True)])
def test_chat_template_renders_as_in_transformers(
    directory: Path, template: str | None, mode: tuple[bool, bool]
) -> None:
    ours, theirs = both(directory)
    prompt, go_on = mode
    expected = theirs.apply_chat_template(
        MESSAGES,
        tokenize=False,
        add_generation_prompt=prompt,
        continue_final_message=go_on,
        chat_template=template,
        flag=True,
    )
    actual = ours.apply_chat_template(MESSAGES, prompt, go_on, template, flag=True)
    assert actual == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "failed: roles must alternate$"),
        ("{% if %}", "the chat template failed"),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_errors_are_one_line(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        demo().apply_chat_template(MESSAGES, chat_template=template)
    assert "\n" not in str(caught.value)


def test_template_is_needed() -> None:
    with pytest.raises(ValueError, match="no chat template: pass one"):
        wrap(tiny_tokenizer()).apply_chat_template(MESSAGES)


def test_continuing_needs_something_to_continue() -> None:
    with pytest.raises(ValueError, match="needs add_generation_prompt=False"):
        demo().apply_chat_template(MESSAGES, True, True)
    with pytest.raises(ValueError, match="last message with content"):
        demo().apply_chat_template([{"role": "user", "content": " "}], False, True)
    with pytest.raises(ValueError, match="changes the last message"):
        demo().apply_chat_template(MESSAGES, False, True, "{{ messages[0].content }}")


def test_eos_ids_come_from_the_generation_config_too(tmp_path: Path) -> None:
    path = save_tiny_hf(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert load_tokenizer(str(path)).eos_token_ids == (1, 3)
    (path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ValueError, match="eos_token_id must be an integer or a list"):
        load_tokenizer(str(path))


def test_damaged_tokenizer_files_are_a_one_line_error(tmp_path: Path) -> None:
    path = save_tiny_hf(tmp_path)
    (path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="cannot load the tokenizer in") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)
