"""A measuring process: one engine, its own peak memory, tasks from standard input.

Run as ``python -m eyas.bench.worker '{"engine": ..., ...}'``. Each line read is a task
``{"task": name, ...}``; each line written is its result. ``Worker`` is the other end of the pipe.
"""

import json
import os
import subprocess
import sys
from typing import Any, Self

from eyas.bench.machine import measure_limits, peak_memory


class Worker:
    """A fresh process with one engine in it; a context manager that ends the process."""

    def __init__(self, **spec: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eyas.bench.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()  # loaded

    def do(self, task: str, **arguments: Any) -> Any:
        """The result of one task; RuntimeError if the process died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measuring process ended with status {self._process.wait()}")
        return json.loads(line)["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # end of input ends the worker
        self._process.stdout.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(spec: dict[str, Any]) -> None:
    """Load the engine, then answer tasks until the end of input."""
    # Results have the original standard output to themselves; what libraries print goes to stderr.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(result: Any) -> None:
        print(json.dumps({"result": result}), file=results, flush=True)

    engine = _load(**spec)
    answer("loaded")
    for line in sys.stdin:
        arguments = json.loads(line)
        task = arguments.pop("task")
        if task == "peak_memory":
            answer(peak_memory())
        elif task == "limits":
            answer(measure_limits(**arguments))
        else:
            answer(getattr(engine, task)(**arguments))


def _load(engine: str, **options: Any) -> Any:
    if engine == "eyas":
        from eyas.bench.engines import EyasEngine

        return EyasEngine(**options)
    if engine == "transformers":
        from eyas.bench.peer import TransformersEngine

        return TransformersEngine(**options)
    assert engine == "none"  # measures the machine itself
    return None


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
