"""Stand-ins for measuring processes."""

from collections.abc import Sequence
from typing import Any


class FakeWorker:
    """Gives its results in order, an exception by raising it, and notes who was asked when."""

    def __init__(self, name: str, results: Sequence[Any], calls: list[str]) -> None:
        self.name, self.results, self.calls = name, iter(results), calls
        self.closed = False

    def do(self, task: str, **arguments: Any) -> Any:
        self.calls.append(self.name)
        result = next(self.results)
        if isinstance(result, Exception):
            raise result
        return result

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True
