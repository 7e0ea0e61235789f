"""The ``eyas`` command: finds the subcommand, runs it, and turns failures into one line.

Exit status: 0 success, 1 a check found a difference, 2 a user's error, 130 interrupted,
141 the reader of our output went away (as a process killed by SIGPIPE reports it).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from eyas.cli import bench, chat, demo, generate, spec_decode, verify
from eyas.cli.arguments import Parser

SUBCOMMANDS: tuple[ModuleType, ...] = (generate, chat, spec_decode, verify, bench, demo)


def build_parser() -> Parser:
    """The whole command line; importing it loads neither torch nor the engine."""
    parser = Parser(
        prog="eyas",
        description="LLM inference whose speculative decoding changes only the clock.",
        epilog="eyas COMMAND --help shows a command's flags; dashes and underscores both work.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=Parser)
    for module in SUBCOMMANDS:
        sub = commands.add_parser(module.NAME, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(sub)
        sub.add_argument(
            "--debug", action="store_true", help="show the traceback of an error, for bug reports"
        )
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit status."""
    _open_closed_streams()
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 2
        return run_reporting_errors(args)
    finally:
        _close_stdout()


def run_reporting_errors(args: argparse.Namespace) -> int:
    """``args.run(args)``; a user's error becomes one line on stderr and exit status 2.

    Only errors that a user can mend are caught (ValueError, OSError); a bug keeps its traceback.
    """
    try:
        status: int = args.run(args)
        sys.stdout.flush()  # a closed pipe shows here, inside the try
        return status
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)  # end the line that ^C stands on
        return 130
    except (ValueError, OSError) as error:
        if args.debug:
            raise
        print(f"eyas: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _open_closed_streams() -> None:
    """Python has None for a stream that was closed before it started (``eyas ... >&-``)."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _close_stdout() -> None:
    """Flush; if the reader is gone, point stdout elsewhere so that exit stays quiet."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
