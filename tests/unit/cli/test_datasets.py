"""Prompt sets: each format as its publishers write it, and one-line errors for bad rows."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from eyas.cli.datasets import Prompt, load_prompts, prompt_token_ids

CATEGORIES = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "STEM",
    "humanities",
    "translation",
    "summarisation",
    "QA",
    "RAG",
}


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_built_in_prompts_are_at_least_forty_in_twelve_categories() -> None:
    prompts = load_prompts(None)
    assert len(prompts) >= 40
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == CATEGORIES
    for prompt in prompts:
        if prompt.category in ("extraction", "summarisation", "RAG", "translation"):
            assert 80 <= len(prompt.text.split()) <= 250


def test_a_limit_on_the_built_in_prompts_keeps_categories_mixed() -> None:
    assert {prompt.category for prompt in load_prompts(None, 12)} == CATEGORIES


def test_spec_bench_takes_the_first_turn(tmp_path: Path) -> None:
    file = write(
        tmp_path / "questions.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        "",
        {"question_id": 82, "category": "math", "turns": ["Count\u2028to ten."]},
    )
    assert load_prompts(file) == [
        Prompt("First.", "writing"),
        Prompt("Count\u2028to ten.", "math"),
    ]


def test_share_gpt_takes_the_first_human_turn(tmp_path: Path) -> None:
    file = write(
        tmp_path / "share.json",
        [
            {"id": "a", "conversations": [{"from": "human", "value": "Hi"}]},
            {"id": "b", "conversations": [{"from": "gpt", "value": "So:"}]},
            {
                "id": "c",
                "conversations": [
                    {"from": "gpt", "value": "Yes?"},
                    {"from": "human", "value": "Why"},
                ],
            },
        ],
    )
    assert [prompt.text for prompt in load_prompts(file)] == ["Hi", "Why"]


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"turns": ["one"]}\n{"turns": ["two"]}\n')
    assert [prompt.text for prompt in load_prompts(str(file))] == ["one", "two"]


def test_a_bracket_alone_makes_no_json(tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.txt", "[INST] hello", "two")
    assert [prompt.text for prompt in load_prompts(file)] == ["[INST] hello", "two"]


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.txt", "one", "", "  two  ", "three")
    assert [prompt.text for prompt in load_prompts(file)] == ["one", "two", "three"]
    assert [prompt.text for prompt in load_prompts(file, 2)] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": [', "data, line 2: not JSON"),
        ('{"turns": ["a"]}\n{"question": "b"}', 'data, line 2: expected an object with "turns"'),
        ('{"turns": []}', 'data, line 1: "turns" is not a list with a first turn'),
        ('{"turns": [3]}', "data, line 1: the prompt is not a text"),
        ('{"turns": [" "]}', "data, line 1: the prompt is not a text, or is empty"),
        ('[\n{"conversations": 1}]', "data, conversation 1: expected"),
        ('[{"conversations": [{"value": "a"}]}]', "data, conversation 1: a turn is not"),
        ('[{"conversations": [{"from": "human"}]}]', "data, conversation 1: the prompt is not"),
        ("[\n{", "data, line 2: not JSON"),
        ("[" * 200_000, "data, line 1: can't be read as JSON"),
        ('{"turns": ["a"]}\n{"turns": ' + "[" * 200_000, "data, line 2: can't be read as JSON"),
        ('{"turns": ["a"], "n": ' + "1" * 5000 + "}", "data, line 1: can't be read as JSON"),
        ("\n \n", "data: holds no prompt"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_prompts(str(file))
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="not UTF-8 text \\(byte 3\\)"):
        load_prompts(str(tmp_path / "data"))


class WordTokenizer:
    """Ids are word lengths; special tokens are id 0."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        [message] = messages
        return f"<{message['role']}> {message['content']}"


def test_chat_template_brings_its_own_special_tokens() -> None:
    prompts = [Prompt("how are you")]
    assert prompt_token_ids(WordTokenizer(), prompts, True) == [[6, 3, 3, 3]]
    assert prompt_token_ids(WordTokenizer(), prompts, False) == [[0, 3, 3, 3]]
