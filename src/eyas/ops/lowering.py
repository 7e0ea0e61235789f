"""From a recording to a native program: kernel calls over few buffers.

Fused on the way, where it can't change a value that somebody reads later:

* a residual add that follows a linear layer becomes the layer's own ``out += ...``;
* what an int8 layer reads is quantised by the norm or gate that makes it, while it is in the cache;
* rope works in place.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas import _core
from eyas.ops.base import Routing
from eyas.ops.recorder import Instruction, Recorded, Recording

View = tuple[int, int, int]  # buffer, first column, width


def lower(
    recording: Recording, program: _core.Program, inputs: Sequence[Recorded], result: Recorded
) -> tuple[list[int], int]:
    """Fill ``program``; the buffers of the float inputs and of the result, which callers bind."""
    assert result.base is None, "a part of a value can't be a result"
    assert all(value is not result for value in inputs), "an input can't be a result"
    return _Lowering(recording.instructions, program, result).run(inputs)


@dataclass(slots=True, eq=False)
class _Storage:
    """A buffer, and the values in it: each root with the column where it begins. ``kept``: it
    belongs to the caller."""

    width: int
    buffer: int
    kept: bool
    roots: list[tuple[Recorded, int]] = field(default_factory=list)


class _Reads:
    """Who reads a value, or a part of it, and when."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._by_root: dict[int, list[tuple[int, Recorded]]] = defaultdict(list)
        self._last: dict[int, int] = {}
        for number, instruction in enumerate(instructions):
            for value in instruction.inputs:
                self._by_root[id(value.root)].append((number, value))
                self._last[id(value)] = number

    def count(self, root: Recorded) -> int:
        return len(self._by_root[id(root)])

    def last(self, value: Recorded) -> int:
        """The last instruction that reads this very value; -1 if none does."""
        return self._last.get(id(value), -1)

    def any_after(self, storage: _Storage, number: int, start: int, stop: int) -> bool:
        """Whether an instruction after ``number`` reads the storage's columns ``start:stop``."""
        return any(
            when > number and at + value.offset < stop and start < at + value.offset + value.width
            for root, at in storage.roots
            for when, value in self._by_root[id(root)]
        )


class _Lowering:
    def __init__(
        self, instructions: Sequence[Instruction], program: _core.Program, result: Recorded
    ) -> None:
        self._instructions = instructions
        self._program = program
        self._result = result
        self._reads = _Reads(instructions)
        self._wants_quant = {
            id(instruction.inputs[0])
            for instruction in instructions
            if instruction.kind == "linear" and instruction.arguments[0].int8
        }
        self._places: dict[int, tuple[_Storage, int]] = {}  # of roots, by id
        self._live: list[_Storage] = []
        self._free: dict[int, list[int]] = defaultdict(list)  # width -> buffers
        self._quant: dict[int, tuple[Recorded, int]] = {}  # by id: a value and its twin's buffer
        self._free_quant: dict[int, list[int]] = defaultdict(list)
        self._merged_add = -1  # the number of an add that the layer before it has done
        self._expert_buffers: dict[tuple[str, int], int] = {}  # (purpose, width) -> buffer
        self._assignments: dict[tuple[int, Routing], _core.Assignments] = {}

    def run(self, inputs: Sequence[Recorded]) -> tuple[list[int], int]:
        for value in (*inputs, self._result):
            buffer = self._program.add_buffer(value.width)
            self._places[id(value)] = (_Storage(value.width, buffer, True, [(value, 0)]), 0)
        for number, instruction in enumerate(self._instructions):
            if number != self._merged_add:
                getattr(self, f"_{instruction.kind}")(instruction, number)
                self._release(number)
        places = [self._places[id(value)][0].buffer for value in (*inputs, self._result)]
        return places[:-1], places[-1]

    # Where values are.

    def _place(self, value: Recorded) -> tuple[_Storage, int]:
        root = value.root
        if id(root) not in self._places:
            free = self._free[root.width]
            buffer = free.pop() if free else self._program.add_buffer(root.width)
            storage = _Storage(root.width, buffer, False, [(root, 0)])
            self._live.append(storage)
            self._places[id(root)] = (storage, 0)
        storage, at = self._places[id(root)]
        return storage, at + value.offset

    def _view(self, value: Recorded) -> View:
        storage, at = self._place(value)
        return storage.buffer, at, value.width

    def _can_replace(self, value: Recorded, number: int) -> bool:
        """Whether something else may be put where ``value`` is, after instruction ``number``."""
        storage, at = self._place(value)
        return not storage.kept and not self._reads.any_after(storage, number, at, at + value.width)

    def _replace(self, value: Recorded, output: Recorded) -> View:
        storage, at = self._place(value)
        storage.roots.append((output, at))
        self._places[id(output)] = (storage, at)
        return self._view(output)

    def _release(self, number: int) -> None:
        """Buffers of which nobody reads anything later are free."""
        for storage in [*self._live]:
            if not self._reads.any_after(storage, number, 0, storage.width):
                self._live.remove(storage)
                self._free[storage.width].append(storage.buffer)
        for key, (value, buffer) in [*self._quant.items()]:
            if self._reads.last(value) <= number:
                del self._quant[key]
                self._free_quant[value.width].append(buffer)

    def _new_quant(self, value: Recorded) -> int:
        free = self._free_quant[value.width]
        buffer = free.pop() if free else self._program.add_quant_buffer(value.width)
        self._quant[id(value)] = (value, buffer)
        return buffer

    def _quant_for_output(self, output: Recorded) -> int:
        """The twin that the maker of ``output`` is to fill; -1 if nobody wants it."""
        return self._new_quant(output) if id(output) in self._wants_quant else -1

    # Instructions, by kind.

    def _embed(self, instruction: Instruction, number: int) -> None:
        table, ids, first = instruction.arguments
        self._program.embed(table, ids.index, first, self._view(instruction.outputs[0]))

    def _linear(self, instruction: Instruction, number: int) -> None:
        (handle,) = instruction.arguments
        (x,), (output,) = instruction.inputs, instruction.outputs
        quant = -1
        if handle.int8:
            if id(x) in self._quant:
                _, quant = self._quant[id(x)]
            else:
                quant = self._new_quant(x)
                self._program.quantise(self._view(x), quant)
        source = self._view(x)
        add = self._residual_add(instruction, number)
        if add is None:
            buffer, offset, _ = self._view(output)
        else:
            buffer, offset, _ = self._replace(add.inputs[0], add.outputs[0])
            self._merged_add = number + 1
        for part in handle.parts:
            view = (buffer, offset + part.offset, part.packed.num_outputs)
            self._program.linear(part.packed, source, quant, view, add is not None)

    def _residual_add(self, linear: Instruction, number: int) -> Instruction | None:
        """The next instruction, if it adds this layer's output, which nobody else reads, to a value
        that can be replaced by the sum."""
        output = linear.outputs[0]
        add = self._instructions[number + 1] if number + 1 < len(self._instructions) else None
        if add is None or add.kind != "add" or add.inputs[1] is not output:
            return None
        residual = add.inputs[0]
        if output is self._result or self._reads.count(output) != 1:
            return None
        if add.outputs[0] is self._result or not self._can_replace(residual, number + 1):
            return None
        # The layer may not change what it still reads.
        same = self._place(residual)[0] is self._place(linear.inputs[0])[0]
        return None if same else add

    def _add(self, instruction: Instruction, number: int) -> None:
        x, y = (self._view(value) for value in instruction.inputs)
        self._program.add(x, y, self._view(instruction.outputs[0]))

    def _scale_rows(self, instruction: Instruction, number: int) -> None:
        x, factor = (self._view(value) for value in instruction.inputs)
        self._program.scale_rows(x, factor, self._view(instruction.outputs[0]))

    def _concat(self, instruction: Instruction, number: int) -> None:
        buffer, offset, _ = self._view(instruction.outputs[0])
        for value in instruction.inputs:
            self._program.copy(self._view(value), (buffer, offset, value.width))
            offset += value.width

    def _gather(self, instruction: Instruction, number: int) -> None:
        group, widths, add_up = instruction.arguments
        x, out = self._view(instruction.inputs[0]), self._view(instruction.outputs[0])
        self._program.gather(group, x, out, widths, add_up)

    def _rms_norm(self, instruction: Instruction, number: int) -> None:
        weight, eps = instruction.arguments
        output = instruction.outputs[0]
        x, out = self._view(instruction.inputs[0]), self._view(output)
        self._program.rms_norm(weight, eps, x, out, self._quant_for_output(output))

    def _silu_mul(self, instruction: Instruction, number: int) -> None:
        output = instruction.outputs[0]
        x, out = self._view(instruction.inputs[0]), self._view(output)
        self._program.silu_mul(x, out, self._quant_for_output(output))

    def _angles(self, instruction: Instruction, number: int) -> None:
        frequencies, positions = instruction.arguments
        cos, sin = (self._view(value) for value in instruction.outputs)
        self._program.angles(frequencies, positions.index, cos, sin)

    def _rope(self, instruction: Instruction, number: int) -> None:
        x, cos, sin = instruction.inputs
        head_dim, interleaved = instruction.arguments
        output = instruction.outputs[0]
        source = self._view(x)
        in_place = output is not self._result and self._can_replace(x, number)
        out = self._replace(x, output) if in_place else self._view(output)
        self._program.rope(source, out, self._view(cos), self._view(sin), head_dim, interleaved)

    def _attention(self, instruction: Instruction, number: int) -> None:
        plan, kv, layer, scale = instruction.arguments
        q, k, v = (self._view(value) for value in instruction.inputs)
        out = self._view(instruction.outputs[0])
        self._program.attention((plan.index, kv.index, layer), q, k, v, out, scale)

    def _moe(self, instruction: Instruction, number: int) -> None:
        handle, routing = instruction.arguments
        x, scores = (self._view(value) for value in instruction.inputs)
        top_k = routing.top_k
        key = (handle.num_experts, routing)
        if key not in self._assignments:
            self._assignments[key] = _core.Assignments(
                handle.num_experts, top_k, routing.kind, routing.normalise
            )
        hidden, size = top_k * handle.hidden_size, top_k * handle.intermediate_size
        buffers = (
            self._expert_buffer("rows", hidden),
            self._expert_buffer("gate_up", 2 * size),
            self._expert_buffer("quant_rows", hidden) if handle.gate_up_int8 else -1,
            self._expert_buffer("quant_gated", size) if handle.down_int8 else -1,
        )
        out = self._view(instruction.outputs[0])
        self._program.moe(handle.packed, self._assignments[key], x, scores, out, buffers)

    def _expert_buffer(self, purpose: str, width: int) -> int:
        """A buffer that all layers' experts use in turn, and nothing else: its rows are not the
        batch's, so kernels that follow each other row by row must not share it with them."""
        key = (purpose, width)
        if key not in self._expert_buffers:
            add = self._program.add_buffer
            if purpose.startswith("quant"):
                add = self._program.add_quant_buffer
            self._expert_buffers[key] = add(width)
        return self._expert_buffers[key]
