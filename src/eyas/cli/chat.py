"""``eyas chat``: a conversation in the terminal, streamed."""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from eyas.cli.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    add_speculation_arguments,
    engine_options,
    positive,
    speculative_config,
)
from eyas.cli.outputs import checked

if TYPE_CHECKING:
    from eyas.engine.output import RequestOutput
    from eyas.llm import LLM
    from eyas.sampling.params import SamplingParams
    from eyas.tokenizer import Tokenizer

NAME = "chat"
HELP = "talk to a model in the terminal"
DESCRIPTION = (
    "Talk to a model. /reset forgets the conversation, /quit (or end of input) ends it, Ctrl-C"
    " stops a reply. Standard input may be a pipe: one message a line."
)

# 256-colour codes for positions 0, 1, ... of a draft, from green to red; deeper ones keep the last.
DRAFT_COLOURS = (46, 82, 118, 154, 190, 226, 214, 202)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command's flags."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour accepted draft tokens by position in their draft (not under NO_COLOR, or when"
        " the output is no terminal)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=512, metavar="N", help="longest reply"
    )
    add_sampling_arguments(parser, temperature=0.0)
    add_speculation_arguments(parser, method="ngram")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """The conversation, until /quit or the end of input."""
    config = speculative_config(args)

    from eyas.llm import LLM
    from eyas.sampling.params import SamplingParams

    params = SamplingParams(
        temperature=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
    )
    interactive = sys.stdin.isatty()
    painter = Painter(args.show_drafts and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    with LLM(args.model, speculative_config=config, **engine_options(args)) as llm:
        if interactive:
            print(f"{args.model} is ready. /reset forgets, /quit ends.", file=sys.stderr)
            if legend := painter.legend(args.num_spec_tokens):
                print(legend, file=sys.stderr)
        start = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(start)
        while (line := _read_message(interactive)) is not None:
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(start)
                print("The conversation is forgotten.", file=sys.stderr)
            elif line.startswith("/"):
                print(f"{line.split()[0]}: /reset and /quit are all there is", file=sys.stderr)
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                try:
                    reply = _reply(llm, asked, params, painter, interactive)
                except ValueError as error:  # most often: the context is full
                    print(f"not sent: {error}; /reset makes room", file=sys.stderr)
                    continue
                messages = [*asked, {"role": "assistant", "content": reply}]
    return 0


class Painter:
    """Colours tokens by their position in the draft that proposed them; None is never coloured."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def paint(self, text: str, draft_position: int | None) -> str:
        """``text`` in its colour. Each line is coloured apart, so that pagers keep up."""
        if not self.enabled or draft_position is None:
            return text
        code = DRAFT_COLOURS[min(draft_position, len(DRAFT_COLOURS) - 1)]
        lines = text.split("\n")
        return "\n".join(f"\033[38;5;{code}m{line}\033[0m" if line else line for line in lines)

    def legend(self, num_positions: int) -> str:
        """One line that names the colours, or nothing where there are none."""
        if not self.enabled:
            return ""
        names = [self.paint(f"draft {i + 1}", i) for i in range(num_positions)]
        return "accepted draft tokens: " + ", ".join(names)


class ReplyWriter:
    """Writes a streamed reply, token by token, each in its colour."""

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int], painter: Painter) -> None:
        from eyas.tokenizer import IncrementalDecoder

        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._painter = painter
        self._shown = 0
        self.text = ""
        self.num_from_drafts = 0

    @property
    def num_tokens(self) -> int:
        return self._shown

    def write(self, output: "RequestOutput") -> None:
        """The tokens of a cumulative output that are not on the screen yet."""
        sample = checked([output])[0].outputs[0]
        new = range(self._shown, len(sample.token_ids))
        for i in new:
            position = sample.draft_positions[i]
            self.num_from_drafts += position is not None
            self._print(self._decoder.push(sample.token_ids[i]), position)
        self._shown = len(sample.token_ids)

    def finish(self) -> None:
        """What the decoder still holds back, and the end of the line."""
        self._print(self._decoder.finish(), None)
        print(flush=True)

    def _print(self, text: str, position: int | None) -> None:
        self.text += text
        print(self._painter.paint(text, position), end="", flush=True)


@contextmanager
def _noticed_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking off in the middle of an engine step."""
    noticed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: noticed.set())
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, before)


def _read_message(interactive: bool) -> str | None:
    """The next line; None at the end of input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None


def _reply(
    llm: "LLM",
    messages: list[dict[str, str]],
    params: "SamplingParams",
    painter: Painter,
    interactive: bool,
) -> str:
    """Stream one reply to the terminal; Ctrl-C keeps what has been said so far."""
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(messages)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    writer = ReplyWriter(tokenizer, prompt, painter)
    started = time.perf_counter()
    with _noticed_interrupt() if interactive else nullcontext(threading.Event()) as interrupted:
        for output in llm.stream(prompt, params):
            writer.write(output)
            if interrupted.is_set():
                break  # drops the iterator, which aborts the request
    writer.finish()
    if interactive:
        rate = writer.num_tokens / (time.perf_counter() - started)
        print(
            f"[{writer.num_tokens} tokens, {writer.num_from_drafts} of them accepted draft tokens,"
            f" {rate:.1f} tok/s]",
            file=sys.stderr,
        )
    return writer.text
