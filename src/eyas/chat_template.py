"""Chat templates: Jinja text that comes with a model and turns messages into a prompt.

The dialect is that of transformers (https://huggingface.co/docs/transformers/chat_templating):
trimmed blocks, loop controls, ``tojson``, ``raise_exception``, ``strftime_now`` and the
``generation`` tag. A template is code from a stranger, so it runs in Jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplate:
    """One template; parsed at its first use. ``render`` may be called often."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._parsed: jinja2.Template | None = None

    def render(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """The prompt for ``messages``. ValueError, in one line, if they aren't messages with a role
        and a text, or if the template fails or raises."""
        _check_messages(messages)
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message goes on with the last message, so it needs "
                "add_generation_prompt=False"
            )
        last = messages[-1].get("content") if messages else None
        if continue_final_message and not (isinstance(last, str) and last.strip()):
            raise ValueError("continue_final_message needs a last message with content")
        values = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            if self._parsed is None:
                self._parsed = _environment().from_string(self.text)
            text = self._parsed.render(values)
        except Exception as error:  # a template can fail in any way that Python can
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template failed: {reason}") from error
        return _cut_after(text, last) if continue_final_message and last else text


def _check_messages(messages: Sequence[Any]) -> None:
    if not messages:
        raise ValueError("the conversation is empty: give at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {number} is a {type(message).__name__}: give a dict with 'role' and "
                "'content'"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {number} has {key} {message.get(key)!r}: give a string")


def _cut_after(text: str, content: str) -> str:
    """``text`` up to the end of its last occurrence of ``content``, which the template may have
    stripped."""
    for form in (content, content.lstrip(), content.rstrip(), content.strip()):
        start = text.rfind(form)
        if start >= 0:
            return text[: start + len(form)]
    raise ValueError("the chat template changes the last message, so it can't be continued")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model wrote, for training; here
    its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without HTML escapes, unlike Jinja's own filter of the name."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
