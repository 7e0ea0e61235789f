"""Argument parsing shared by the subcommands: the parser, and the flags that build an LLM."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

METHODS = ("ngram", "suffix", "draft_model", "eagle", "None")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes ``--max_num_seqs`` for ``--max-num-seqs``, never guesses from
    a prefix, and reports an error in one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Formatter)
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super().parse_known_args(dashed(sys.argv[1:] if args is None else args), namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"eyas: error: {message} (see {self.prog} --help)\n")


class _Formatter(argparse.HelpFormatter):
    """Flags in one column, and each default after its help text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = "default" in text or any(
            action.default is value for value in (None, False, argparse.SUPPRESS)
        )
        return text if silent or not action.option_strings else f"{text} (default: %(default)s)"


def dashed(args: Sequence[str]) -> list[str]:
    """``--flag_name=value`` as ``--flag-name=value``; values and all after ``--`` stay."""
    result = list(args)
    for i, arg in enumerate(result):
        if arg == "--":
            break
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            result[i] = name.replace("_", "-") + equals + value
    return result


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which model runs and within which limits."""
    group = parser.add_argument_group("model and limits")
    group.add_argument(
        "--model",
        default="demo",
        metavar="NAME",
        help="a Hugging Face directory, a GGUF file, a Hub id, or demo",
    )
    group.add_argument("--tokenizer", metavar="NAME", help="another tokenizer than the model's")
    add_limit_arguments(group)


def add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    """The engine's limits and how it holds weights; those not given are the engine's defaults."""
    group.add_argument(
        "--max-model-len", type=positive, metavar="N", help="longest context, tokens"
    )
    group.add_argument("--max-num-seqs", type=positive, metavar="N", help="most requests in a step")
    group.add_argument(
        "--max-num-batched-tokens", type=positive, metavar="N", help="token budget of a step"
    )
    group.add_argument("--kv-cache-memory", type=positive, metavar="BYTES", help="size of KV cache")
    group.add_argument("--num-threads", type=positive, metavar="N", help="compute threads")
    group.add_argument(
        "--quantization",
        choices=("q8", "q4"),
        help="quantise a float model to 8 or 4 bits as it loads",
    )


def add_speculation_arguments(parser: argparse.ArgumentParser, method: str) -> None:
    """The flags that say whether and how to speculate; ``method`` is the default."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--method",
        choices=METHODS,
        default=method,
        help="who proposes tokens: ngram looks the last few tokens up in the text, suffix"
        " the longest repetition, draft_model is a smaller model, None is plain decoding",
    )
    group.add_argument(
        "--num-spec-tokens", type=positive, default=4, metavar="K", help="tokens per draft"
    )
    group.add_argument(
        "--prompt-lookup-max", type=positive, default=4, metavar="N", help="longest n-gram matched"
    )
    group.add_argument(
        "--prompt-lookup-min", type=positive, default=1, metavar="N", help="shortest n-gram matched"
    )
    group.add_argument("--draft-model", metavar="NAME", help="the model for --method draft_model")
    group.add_argument(
        "--acceptance",
        choices=("exact", "rejection"),
        default="exact",
        help="exact: the text is the same as without speculation; rejection: the same distribution",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    """Temperature, top-p, top-k and the seed."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temp", type=float, default=temperature, metavar="T", help="temperature; 0 is greedy"
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus; 1 is off")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="most tokens; 0 is off")
    group.add_argument("--seed", type=int, default=0, help="seed of the sampling")


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """The parsed speculation flags as ``LLM``'s ``speculative_config``; None is plain decoding."""
    if args.draft_model is not None and args.method != "draft_model":
        raise ValueError(f"--draft-model goes with --method draft_model, not {args.method}")
    if args.method == "None":
        return None
    if args.method == "eagle":
        raise ValueError(
            "--method eagle is not in this version: use --method ngram or --method draft_model"
        )
    config: dict[str, Any] = {
        "method": args.method,
        "num_speculative_tokens": args.num_spec_tokens,
        "acceptance": args.acceptance,
    }
    if args.method == "ngram":
        if args.prompt_lookup_min > args.prompt_lookup_max:
            raise ValueError(
                f"--prompt-lookup-min {args.prompt_lookup_min} exceeds"
                f" --prompt-lookup-max {args.prompt_lookup_max}"
            )
        config["prompt_lookup_max"] = args.prompt_lookup_max
        config["prompt_lookup_min"] = args.prompt_lookup_min
    if args.method == "draft_model":
        if args.draft_model is None:
            raise ValueError("--method draft_model needs --draft-model: the smaller model's name")
        config["model"] = args.draft_model
    return config


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The limits that were given, under ``LLM``'s names."""
    names = (
        "tokenizer",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory",
        "num_threads",
        "quantization",
        "enable_chunked_prefill",
    )
    given = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}
