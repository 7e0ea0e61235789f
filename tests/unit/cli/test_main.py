"""Failures of the command: one line, the right exit status, no traceback."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.cli.main import main, run_reporting_errors

EXAMPLE = Path(__file__).parents[3] / "examples" / "offline_inference" / "spec_decode.py"


def eyas(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eyas", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["spec-decode", "--dataset_path", "/no/such"], "/no/such: No such file or directory"),
        (["spec-decode", "--tp", "2"], "--tp 2: this version runs on one rank only"),
        (["spec-decode", "--eagle_dir", "x"], "--eagle-dir: EAGLE drafts are not in this version"),
        (["verify", "--method", "None"], "--method None leaves nothing to verify"),
        (["verify", "--acceptance", "rejection"], "only exact keeps both"),
        (["chat", "--method", "eagle"], "--method eagle is not in this version"),
        (["generate", "--stream", "-n", "2", "x"], "--stream prints one text"),
        (["bench", "report", "--root", "/no/such"], "/no/such/benchmarks/results: no benchmark"),
        (["generate", "--max-num-seqs", "0"], "0 is not a positive number"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_user_errors_are_one_line_and_status_2(argv: list[str], message: str) -> None:
    done = eyas(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("eyas: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    done = eyas("spec-decode", "--tp", "2", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_the_example_is_the_same_program() -> None:
    command = [sys.executable, str(EXAMPLE), "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, eyas("spec-decode", "--tp", "2").stderr)


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_interrupt_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_reporting_errors(argparse.Namespace(run=raising(KeyboardInterrupt()))) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError):
        run_reporting_errors(argparse.Namespace(run=raising(AssertionError()), debug=False))


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in ``eyas ... | head``: more than a pipe's 64 KiB to a reader that is gone."""
    script = (
        "import sys; from eyas.cli import generate, main\n"
        "def run(args):\n    for _ in range(20000): print('x' * 100)\n    return 0\n"
        "generate.run = run\nsys.exit(main.main(['generate', 'x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
