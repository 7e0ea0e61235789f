"""Looking into a running engine: its native programs, and the time that one method takes."""

import time
from types import TracebackType
from typing import Any, Self

from eyas.ops.compiled import Compiled


def native_programs(model: Any) -> list[Any]:
    """The compiled functions' programs. ValueError if the model has none: only native ops do."""
    compiled = [value for value in vars(model).values() if isinstance(value, Compiled)]
    if not compiled:
        raise ValueError("the model has no native programs to profile")
    for function in compiled:
        assert function.program is not None, "profile a model after its first run"
    return [function.program for function in compiled]


class Stopwatch:
    """Within the context, adds up the ``seconds`` that calls of ``owner.method`` take."""

    def __init__(self, owner: Any, method: str) -> None:
        self.seconds = 0.0
        self._owner, self._method = owner, method

    def __enter__(self) -> Self:
        original = getattr(self._owner, self._method)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(self._owner, self._method, timed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        delattr(self._owner, self._method)  # the class's own is behind it
