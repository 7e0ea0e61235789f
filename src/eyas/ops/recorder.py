"""Recording what a function does with ops: instructions over values, each made once and never
changed. ``lowering`` turns the notes into kernel calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Recorded:
    """A value of the recording: columns ``offset .. offset + width`` of ``base`` (itself, unless
    it was split off)."""

    width: int
    offset: int = 0
    base: "Recorded | None" = None

    @property
    def root(self) -> "Recorded":
        return self if self.base is None else self.base


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An integer tensor, a plan or a KV cache: the ``index``-th of its kind in a call."""

    index: int


@dataclass(slots=True, eq=False)
class Instruction:
    """``kind`` names a method of ``_core.Program``; ``arguments`` are what its kernel needs."""

    kind: str
    inputs: tuple[Recorded, ...]
    outputs: tuple[Recorded, ...]
    arguments: tuple[Any, ...] = ()


@dataclass(slots=True)
class Recording:
    """What a function did, in order."""

    instructions: list[Instruction] = field(default_factory=list)

    def add(self, kind: str, inputs: Sequence[Recorded], width: int, *arguments: Any) -> Recorded:
        """Note an instruction with one output."""
        output = Recorded(width)
        self.instructions.append(Instruction(kind, tuple(inputs), (output,), arguments))
        return output
