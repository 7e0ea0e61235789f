"""A function over native ops, recorded and replayed."""

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from eyas import _core
from eyas.ops.base import Array, KVCache
from eyas.ops.lowering import lower
from eyas.ops.recorder import Input, Recorded, Recording

_KEPT_BYTES = 16 << 20  # of a result's memory, for the next one


class Compiled:
    """A function over ops: recorded at its first call, replayed at every call.

    ``record`` calls it with stand-ins of its arguments, and returns what it did and its result.
    """

    def __init__(
        self,
        context: _core.Context,
        record: Callable[[Sequence[Any]], tuple[Recording, Recorded]],
    ) -> None:
        self._context = context
        self._record = record
        self._places: dict[str, list[int]] = {}  # of each kind among the arguments
        self._inputs: list[int] = []  # buffers of the float arrays
        self._result = 0  # buffer of the result
        self._width = 0
        self._memory = np.empty((0, 0), np.float32)  # of an earlier result
        self._unshared = getrefcount(self._memory)  # while nobody else has it
        self.program: Any = None

    def __call__(self, *arguments: Any) -> Array:
        if self.program is None:
            self._compile(arguments)
        places = self._places
        floats = [arguments[i] for i in places["float"]]
        ids = [arguments[i] for i in places["ids"]]
        num_rows = len(floats[0] if floats else ids[0])
        result = self._result_rows(num_rows)
        if num_rows:
            self.program.run(
                num_rows,
                [*zip(self._inputs, floats, strict=True), (self._result, result)],
                ids,
                [arguments[i] for i in places["plan"]],
                [arguments[i].handle for i in places["cache"]],
            )
        return result

    def _result_rows(self, num_rows: int) -> Array:
        """Memory for a result: an earlier one's if nobody holds that any more, as fresh memory
        costs a page fault for each page."""
        if len(self._memory) < num_rows or getrefcount(self._memory) > self._unshared:
            memory = np.empty((num_rows, self._width), np.float32)
            if memory.nbytes > _KEPT_BYTES:
                return memory
            self._memory = memory
        return self._memory[:num_rows]

    def _compile(self, arguments: Sequence[Any]) -> None:
        inputs: list[Recorded] = []
        places = self._places = {"float": [], "ids": [], "plan": [], "cache": []}

        def stand_in(place: int, value: Any) -> Recorded | Input:
            if isinstance(value, np.ndarray) and value.dtype == np.float32:
                places["float"].append(place)
                inputs.append(Recorded(value.shape[1]))
                return inputs[-1]
            kind = "plan"
            if isinstance(value, np.ndarray):
                kind = "ids"
            elif isinstance(value, KVCache):
                kind = "cache"
            places[kind].append(place)
            return Input(len(places[kind]) - 1)

        stand_ins = [stand_in(place, value) for place, value in enumerate(arguments)]
        recording, result = self._record(stand_ins)
        program = _core.Program(self._context)
        self._inputs, self._result = lower(recording, program, inputs, result)
        self._width = result.width
        self.program = program
