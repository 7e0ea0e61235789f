"""Prompt sets: the built-in one, Spec-Bench / MT-bench JSONL, ShareGPT JSON, plain text."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

BUILT_IN = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one user asks; ``category`` is None where the file names none."""

    text: str
    category: str | None = None


class ChatTokenizer(Protocol):
    """The part of a tokenizer that turns a question into prompt tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str: ...


def load_prompts(path: str | None, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a file (None: the built-in set), in order.

    The format follows from the content, not from the name: a JSON list is ShareGPT, a file whose
    first line is a JSON object is JSONL with ``turns`` or ``prompt``, anything else is plain text,
    one prompt a line. Of a conversation, the first turn of the user is taken. The built-in set
    under a limit keeps its categories mixed: it takes turns.

    ValueError naming file and line for a row that is no prompt; OSError if the file can't be read.
    """
    file = BUILT_IN if path is None else Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text (byte {error.start}): {error.reason}") from None
    prompts = list(_parse(file, text))
    if not prompts:
        raise ValueError(f"{file}: holds no prompt")
    if path is None:
        prompts = _take_turns(prompts)
    return prompts[:limit]


def prompt_token_ids(
    tokenizer: ChatTokenizer, prompts: Sequence[Prompt], chat_template: bool
) -> list[list[int]]:
    """Each prompt's token ids, as the user's message of a chat or (False) as it stands."""
    if not chat_template:
        return [tokenizer.encode(prompt.text) for prompt in prompts]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
        for prompt in prompts
    ]
    # The template has written the special tokens itself.
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _parse(file: Path, text: str) -> Iterator[Prompt]:
    start = text.lstrip()
    if re.match(r"\[\s*([\[{\]]|$)", start):  # not "[INST]", which is plain text
        return _share_gpt(file, text)
    if start.startswith("{"):
        return _json_lines(file, text)
    return (Prompt(line.strip()) for line in text.splitlines() if line.strip())


def _json_lines(file: Path, text: str) -> Iterator[Prompt]:
    # split("\n"), not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        yield _json_prompt(_load_json(file, line, number), f"{file}, line {number}")


def _load_json(file: Path, text: str, first_line: int) -> Any:
    """``text``, which begins at ``first_line`` of the file, as JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{file}, line {line}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; deep nesting
        raise ValueError(f"{file}, line {first_line}: can't be read as JSON: {error}") from None


def _json_prompt(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict) or not ("turns" in row or "prompt" in row):
        raise ValueError(f'{where}: expected an object with "turns" or "prompt"')
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f'{where}: "turns" is not a list with a first turn')
        text = turns[0]
    else:
        text = row["prompt"]
    category = row.get("category")
    return Prompt(_checked_text(text, where), None if category is None else str(category))


def _share_gpt(file: Path, text: str) -> Iterator[Prompt]:
    for number, row in enumerate(_load_json(file, text, 1), start=1):
        where = f"{file}, conversation {number}"
        turns = row.get("conversations") if isinstance(row, dict) else None
        if not isinstance(turns, list):
            raise ValueError(f'{where}: expected an object with a "conversations" list')
        asked = [turn for turn in turns if _is_user_turn(turn, where)]
        if asked:  # ShareGPT has conversations that the user never opens: not prompts
            yield Prompt(_checked_text(asked[0].get("value"), where))


def _is_user_turn(turn: Any, where: str) -> bool:
    if not isinstance(turn, dict) or "from" not in turn:
        raise ValueError(f'{where}: a turn is not an object with "from" and "value"')
    return turn["from"] in ("human", "user")


def _checked_text(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: the prompt is not a text, or is empty")
    return text


def _take_turns(prompts: list[Prompt]) -> list[Prompt]:
    """The first prompt of every category, then the second of every category, and so on."""
    seen: dict[str | None, int] = {}
    keyed: list[tuple[int, Prompt]] = []
    for prompt in prompts:
        keyed.append((seen.get(prompt.category, 0), prompt))
        seen[prompt.category] = keyed[-1][0] + 1
    return [prompt for _, prompt in sorted(keyed, key=lambda pair: pair[0])]
