"""The command line: flags with dashes and underscores, defaults, the frozen flag list, help."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.cli.arguments import dashed, speculative_config
from eyas.cli.main import SUBCOMMANDS, build_parser
from eyas.drafters import ngram

FLAGS = Path(__file__).with_name("flags.txt")
NAMES = [module.NAME for module in SUBCOMMANDS]


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def flag_list() -> str:
    """Every subcommand's flags with their choices and defaults, one a line."""
    lines = []
    parser = build_parser()
    [commands] = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, sub in commands.choices.items():
        for action in sub._actions:
            flags = ", ".join(action.option_strings) or f"<{action.dest}>"
            if flags == "-h, --help":
                continue
            choices = f" {{{','.join(action.choices)}}}" if action.choices else ""
            default = "" if action.default is None else f" = {action.default}"
            lines.append(f"{name} {flags}{choices}{default}")
    return "\n".join(lines) + "\n"


def test_flags_are_those_committed() -> None:
    """Scripts depend on flags: a change shows in this file's diff, and in the change's review."""
    assert flag_list() == FLAGS.read_text()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--max_num_seqs", "4"], ["--max-num-seqs", "4"]),
        (["--dataset_path=my_file.txt"], ["--dataset-path=my_file.txt"]),
        (["--model", "my_model"], ["--model", "my_model"]),
        (["a_b", "-n", "2"], ["a_b", "-n", "2"]),
        (["--", "--a_b"], ["--", "--a_b"]),
    ],
)
def test_underscores_become_dashes_in_flag_names_only(
    given: list[str], expected: list[str]
) -> None:
    assert dashed(given) == expected


def test_flags_of_the_issue_that_vllms_script_has() -> None:
    line = (
        "spec-decode --method ngram --num_spec_tokens 3 --num_prompts 8 --model_dir d --tp 1"
        " --prompt_lookup_max 5 --prompt_lookup_min 1 --temp 0.5 --top_p 0.9 --top_k 40"
        " --output_len 32 --dataset_path f.jsonl --print_output --enable_chunked_prefill"
        " --max_num_seqs 2"
    )
    args = parse(*line.split())
    assert (args.model_dir, args.output_len, args.max_num_seqs) == ("d", 32, 2)
    assert args.print_output
    assert args.enable_chunked_prefill
    assert speculative_config(args) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "acceptance": "exact",
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 1,
    }


def test_a_prefix_of_a_flag_is_not_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("spec-decode", "--num_spec", "3")
    assert exit_info.value.code == 2
    assert "--num-spec" in capsys.readouterr().err


def test_ngram_defaults_are_the_drafters() -> None:
    defaults = ngram.Options()
    config = speculative_config(parse("generate"))
    assert config is not None
    assert config["prompt_lookup_max"] == defaults.prompt_lookup_max
    assert config["prompt_lookup_min"] == defaults.prompt_lookup_min


def test_method_none_is_plain_decoding() -> None:
    assert speculative_config(parse("generate", "--method", "None")) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--method", "eagle"], "--method eagle is not in this version"),
        (["--method", "draft_model"], "needs --draft-model"),
        (["--draft_model", "x"], "--draft-model goes with --method draft_model, not ngram"),
        (
            ["--prompt_lookup_min", "5", "--prompt_lookup_max", "3"],
            "--prompt-lookup-min 5 exceeds --prompt-lookup-max 3",
        ),
    ],
)
def test_contradictory_speculation_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculative_config(parse("spec-decode", *argv))


@pytest.mark.parametrize("name", NAMES)
def test_help_is_short_and_names_every_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(name, "--help")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 80
    [commands] = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in commands.choices[name]._actions:
        assert action.help
        for flag in action.option_strings:
            assert flag in text


def test_help_loads_nothing_heavy() -> None:
    """``eyas --help`` must answer at once: it may load neither torch nor transformers."""
    script = (
        "import sys; from eyas.cli.main import build_parser; build_parser().format_help();"
        "assert not {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True)
    assert time.perf_counter() - started < 3  # generous: the machine may be busy
