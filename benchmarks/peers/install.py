"""Installs peers from PyPI, each in a virtual environment of its own.

Run again after an interruption, it continues; what is complete is left alone.

    python benchmarks/peers/install.py all
    python benchmarks/peers/install.py llama_cpp --peers-dir DIR
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from environments import DEFAULT_FOLDER, RECIPES, Recipe, stamp


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("name", choices=(*RECIPES, "all"))
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_FOLDER, metavar="DIR")
    options = parser.parse_args()
    folder = options.peers_dir.expanduser().absolute()
    failed = []
    for name in RECIPES if options.name == "all" else (options.name,):
        try:
            install(name, folder)
        except (RuntimeError, OSError) as error:
            _say(name, str(error))
            failed.append(name)
    if failed:
        print(f"not installed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def install(name: str, folder: Path) -> None:
    """RuntimeError, with the log's end, if a step fails."""
    recipe = RECIPES[name]
    wanted = asdict(recipe)
    del wanted["note"]
    text = json.dumps(wanted, indent=1) + "\n"
    finished = stamp(name, folder)
    # An interrupted installation is continued; one of another recipe is of no use to pip.
    clear = []
    if finished.is_file():
        if finished.read_text() == text:
            _say(name, f"installed already, in {folder / name}")
            return
        clear = ["--clear"]
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    finished.unlink(missing_ok=True)
    python = str(home / "bin" / "python")
    steps = [("making the environment", [sys.executable, "-m", "venv", *clear, str(home)])]
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    pinned = " ".join(p for p in recipe.packages if not p.startswith("-"))
    note = f" ({recipe.note})" if recipe.note else ""
    steps.append((f"installing {pinned}{note}", [*pip, "install", *recipe.packages]))
    if recipe.remove:
        removing = f"removing {', '.join(recipe.remove)}"
        steps.append((removing, [*pip, "uninstall", "--yes", *recipe.remove]))
    steps.append((f"importing {recipe.imports}", [python, "-c", f"import {recipe.imports}"]))
    for step, command in steps:
        _say(name, step)
        _run(command, recipe, home / "install.log")
    finished.write_text(text)
    _say(name, f"installed in {home}")


def _run(command: list[str], recipe: Recipe, log: Path) -> None:
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(recipe.environment),
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=30)
                    break
                except subprocess.TimeoutExpired:
                    print(f"  ... {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        lines = log.read_text(errors="replace").splitlines()[-12:]
        end = "".join(f"\n  | {line[:200]}" for line in lines)
        raise RuntimeError(f"failed with status {status}; the end of {log}:{end}")


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; run the same command again to continue")
