"""A measuring process: one engine, its own peak memory, tasks from standard input.

Run as ``python -m eyas.bench.worker '{"engine": ..., ...}'``. Each line read is a task
``{"task": name, ...}``; each line written is its ``{"result": ...}``, or an ``{"error": ...}`` that
ends the process. ``Worker`` is the other end of the pipe; it may start another program that keeps
to the same lines, such as ``benchmarks/peers/*.py``, which run in an environment of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from eyas.bench.machine import measure_limits, peak_memory

_OWN_COMMAND = (sys.executable, "-m", "eyas.bench.worker")


class Worker:
    """A fresh process with one engine in it; a context manager that ends the process.

    ``command`` gets the JSON of ``spec`` as its last argument. RuntimeError if the engine doesn't
    load, with what it says.
    """

    def __init__(self, command: Sequence[str] = _OWN_COMMAND, **spec: Any) -> None:
        self._process = subprocess.Popen(
            [*command, json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self._read()  # loaded
        except BaseException:
            self.close()
            raise

    def do(self, task: str, **arguments: Any) -> Any:
        """The result of one task; RuntimeError if the process died."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: reading says how
            self._process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def cpu_seconds(self) -> float:
        """Processor time that the process has used so far; 0 where /proc doesn't tell."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measuring process ended with status {self._process.wait()}")
        message = json.loads(line)
        if "error" in message:
            raise RuntimeError(message["error"])
        return message["result"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # end of input ends the worker
        self._process.stdout.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(spec: dict[str, Any]) -> None:
    """Load the engine, then answer tasks until the end of input."""
    # Results have the original standard output to themselves; what libraries print goes to stderr.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(kind: str, content: Any) -> None:
        print(json.dumps({kind: content}), file=results, flush=True)

    try:
        engine = _load(**spec)
        answer("result", "loaded")
        for line in sys.stdin:
            arguments = json.loads(line)
            task = arguments.pop("task")
            if task == "peak_memory":
                answer("result", peak_memory())
            elif task == "limits":
                answer("result", measure_limits(**arguments))
            else:
                answer("result", getattr(engine, task)(**arguments))
    except (ValueError, OSError) as error:
        answer("error", str(error))
        sys.exit(1)


def _load(engine: str, **options: Any) -> Any:
    if engine == "eyas":
        from eyas.bench.engines import EyasEngine

        return EyasEngine(**options)
    if engine == "eyas_model":
        from eyas.bench.direct import ModelEngine

        return ModelEngine(**options)
    if engine == "transformers":
        from eyas.bench.peer import TransformersEngine

        return TransformersEngine(**options)
    if engine == "import_torch":  # what every process that uses torch has in memory
        import torch

        return torch
    assert engine == "none"  # measures the machine itself
    return None


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
