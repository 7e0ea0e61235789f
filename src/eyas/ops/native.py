"""NativeOps: the kernels of ``csrc/``, recorded once per model and replayed once per step."""

import copy
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from eyas import _core
from eyas.ops.base import (
    AttentionShape,
    AttentionSpan,
    KVCache,
    KVLayer,
    KVShape,
    Routing,
    Value,
)
from eyas.ops.compiled import Compiled
from eyas.ops.recorder import Input, Instruction, Recorded, Recording
from eyas.parallel import SINGLE, Parallel, Share
from eyas.tensors import StoredTensor

logger = logging.getLogger(__name__)

ActivationType = Literal["auto", "int8", "float32"]
ISA_VARIABLE = "EYAS_ISA"

_CHUNK_BYTES = 16 << 20
_FLOATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_FLOAT_FORMATS = tuple(_FLOATS.values())
_NO_KERNEL = ("q2_k", "q3_k")  # kept as float32


@dataclass(frozen=True, slots=True)
class _Part:
    """Outputs ``offset ..`` of a linear layer."""

    packed: Any
    offset: int


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A [num_outputs, num_inputs] weight, in one part per stored format."""

    parts: tuple[_Part, ...]
    num_outputs: int
    num_inputs: int
    int8: bool


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """A mixture of experts; whether its layers want int8 activations."""

    packed: Any
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate_up_int8: bool
    down_int8: bool


@dataclass(slots=True)
class _Recorder:
    """The recording under way, if any: of these ops, and of ``single`` ones made from them."""

    recording: Recording | None = None


class NativeOps:
    """The Ops protocol on this machine's best instruction set (or the one that EYAS_ISA names).

    ``weight_dtype`` None keeps weights as they are stored, bit for bit; a float type rounds them to
    it. ``activation_dtype``: what quantised weights are multiplied with: "int8" (which "auto" is),
    quantised per row and group of 32, or "float32". ``num_threads`` None is one per core.
    ``group``: where the ranks that run a model together meet; None: this one runs it alone.

    ValueError for an instruction set that is not in this build, or that this machine lacks.
    """

    name = "native"

    def __init__(
        self,
        weight_dtype: torch.dtype | None = None,
        activation_dtype: ActivationType = "auto",
        num_threads: int | None = None,
        instruction_set: str | None = None,
        group: _core.Group | None = None,
    ) -> None:
        isa = instruction_set or os.environ.get(ISA_VARIABLE) or _core.instruction_sets()[0]
        self.context = _core.Context(isa, num_threads or _available_cores())
        self._arena = _core.Arena()
        self._weight_format = None if weight_dtype is None else _FLOATS[weight_dtype]
        self._int8 = activation_dtype != "float32"
        self._recorder = _Recorder()
        self._group = group
        self.parallel = SINGLE if group is None else Parallel(group.rank, group.size)

    def single(self) -> "NativeOps":
        ops = copy.copy(self)
        ops._group, ops.parallel = None, SINGLE
        return ops

    def compile(self, function: Callable[..., Value]) -> Compiled:
        def record(stand_ins: Sequence[Any]) -> tuple[Recording, Recorded]:
            assert self._recorder.recording is None, "a compiled function called another one"
            recording = self._recorder.recording = Recording()
            try:
                return recording, function(*stand_ins)
            finally:
                self._recorder.recording = None

        return Compiled(self.context, record)

    def pack_linear(
        self, weights: Sequence[StoredTensor], bias: torch.Tensor | None
    ) -> NativeLinear:
        return self._pack_linear(weights, bias, self._all_int8(weights))

    def pack_experts(
        self, gate_up: Sequence[Sequence[StoredTensor]], down: Sequence[StoredTensor]
    ) -> NativeExperts:
        # One form of activations serves all experts.
        gate_up_int8 = all(self._all_int8(weights) for weights in gate_up)
        down_int8 = self._all_int8(down)
        first = [self._pack_linear(weights, None, gate_up_int8) for weights in gate_up]
        second = [self._pack_linear([weight], None, down_int8) for weight in down]
        hidden_size, intermediate_size = down[0].shape
        assert {(w.num_outputs, w.num_inputs) for w in first} == {
            (2 * intermediate_size, hidden_size)
        }, "gate and up don't fit down"
        assert {(w.num_outputs, w.num_inputs) for w in second} == {
            (hidden_size, intermediate_size)
        }, "experts of different sizes"
        packed = _core.Experts(
            [[(part.packed, part.offset) for part in linear.parts] for linear in first],
            [[(part.packed, part.offset) for part in linear.parts] for linear in second],
            hidden_size,
            intermediate_size,
        )
        return NativeExperts(
            packed, len(down), hidden_size, intermediate_size, gate_up_int8, down_int8
        )

    def _all_int8(self, weights: Sequence[StoredTensor]) -> bool:
        """Whether one form of activations, int8, can serve all the weights."""
        floats = (*_FLOAT_FORMATS, *_NO_KERNEL)
        kept = self._weight_format is None
        return self._int8 and kept and all(weight.format not in floats for weight in weights)

    def _pack_linear(
        self, weights: Sequence[StoredTensor], bias: torch.Tensor | None, int8: bool
    ) -> NativeLinear:
        runs: list[tuple[str, list[StoredTensor]]] = []
        for weight in weights:
            kept = self._kept_format(weight)
            if runs and runs[-1][0] == kept:
                runs[-1][1].append(weight)
            else:
                runs.append((kept, [weight]))
        (num_inputs,) = {weight.shape[1] for weight in weights}
        parts, offset = [], 0
        for kept, tensors in runs:
            size = sum(tensor.shape[0] for tensor in tensors)
            own_bias = None if bias is None else bias[offset : offset + size].contiguous()
            parts.append(_Part(self._pack(tensors, kept, own_bias), offset))
            offset += size
        return NativeLinear(tuple(parts), offset, num_inputs, int8)

    def pack_embedding(self, weight: StoredTensor) -> NativeLinear:
        return self.pack_linear([weight], None)

    def allocate_kv(self, shape: KVShape, dtype: torch.dtype) -> KVCache:
        blocks, size = shape.num_blocks, shape.block_size
        heads, head_dim = shape.num_kv_heads, shape.head_dim

        count = blocks * size * heads * head_dim
        memory = _pages(2 * shape.num_layers * count * dtype.itemsize, dtype)
        parts = memory.view(shape.num_layers, 2, count)
        # A block's keys lie input by input, so that 16 keys make a vector; see csrc/kernels.h.
        stored = [
            (
                parts[layer, 0].view(blocks, heads, head_dim, size),
                parts[layer, 1].view(blocks, heads, size, head_dim),
            )
            for layer in range(shape.num_layers)
        ]
        addresses = [(keys.data_ptr(), values.data_ptr()) for keys, values in stored]
        return KVCache(
            tuple(
                KVLayer(keys.permute(0, 3, 1, 2), values.permute(0, 2, 1, 3))
                for keys, values in stored
            ),
            _core.KVCache(_FLOATS[dtype], addresses),
        )

    def plan_attention(
        self, shape: AttentionShape, spans: Sequence[AttentionSpan], block_size: int
    ) -> Any:
        heads = (shape.num_query_heads, shape.num_kv_heads, shape.head_dim)
        for span in spans:
            first = 0 if shape.window is None else max(0, span.position - shape.window + 1)
            assert span.first_block * block_size <= first, span  # all that it sees has a block
        tuples = [
            (span.row, span.num_queries, span.position, span.first_block, span.blocks)
            for span in spans
        ]
        return _core.plan_attention(self.context, heads, block_size, shape.window or 0, tuples)

    def linear(self, handle: NativeLinear, x: Recorded) -> Recorded:
        assert x.width == handle.num_inputs, (x.width, handle.num_inputs)
        return self._record("linear", [x], handle.num_outputs, handle)

    def embed(self, handle: NativeLinear, ids: Input, first: int = 0) -> Recorded:
        (part,) = handle.parts
        return self._record("embed", [], handle.num_inputs, part.packed, ids, first)

    def all_reduce(self, x: Recorded) -> Recorded:
        if self._group is None:
            return x
        widths = [x.width] * self.parallel.size
        return self._record("gather", [x], x.width, self._group, widths, True)

    def all_gather(self, x: Recorded, shares: Sequence[Share]) -> Recorded:
        widths = [share.size for share in shares]
        assert x.width == widths[self.parallel.rank], (x.width, shares)
        if self._group is None:
            return x
        return self._record("gather", [x], sum(widths), self._group, widths, False)

    def split(self, x: Recorded, widths: Sequence[int]) -> tuple[Recorded, ...]:
        assert sum(widths) == x.width, (widths, x.width)
        starts = [x.offset + sum(widths[:i]) for i in range(len(widths))]
        return tuple(
            Recorded(width, start, x.root) for width, start in zip(widths, starts, strict=True)
        )

    def add(self, x: Recorded, y: Recorded) -> Recorded:
        assert x.width == y.width, (x.width, y.width)
        return self._record("add", [x, y], x.width)

    def concat(self, values: Sequence[Recorded]) -> Recorded:
        return self._record("concat", [*values], sum(value.width for value in values))

    def scale_rows(self, x: Recorded, factor: Recorded) -> Recorded:
        assert factor.width == 1, factor.width
        return self._record("scale_rows", [x, factor], x.width)

    def rms_norm(self, x: Recorded, weight: torch.Tensor, eps: float) -> Recorded:
        assert x.width % len(weight) == 0, (x.width, len(weight))
        return self._record("rms_norm", [x], x.width, weight.tolist(), eps)

    def angles(self, inv_freq: torch.Tensor, positions: Input) -> tuple[Recorded, Recorded]:
        recording = self._recorder.recording
        assert recording is not None, "angles outside a compiled function"
        tables = Recorded(len(inv_freq)), Recorded(len(inv_freq))
        recording.instructions.append(
            Instruction("angles", (), tables, (inv_freq.tolist(), positions))
        )
        return tables

    def rope(
        self, x: Recorded, angles: tuple[Recorded, Recorded], interleaved: bool = False
    ) -> Recorded:
        head_dim = 2 * angles[0].width
        assert x.width % head_dim == 0, (x.width, head_dim)
        return self._record("rope", [x, *angles], x.width, head_dim, interleaved)

    def silu_mul(self, gate_up: Recorded) -> Recorded:
        return self._record("silu_mul", [gate_up], gate_up.width // 2)

    def moe(
        self, handle: NativeExperts, x: Recorded, scores: Recorded, routing: Routing
    ) -> Recorded:
        assert x.width == handle.hidden_size, (x.width, handle.hidden_size)
        assert scores.width == handle.num_experts, (scores.width, handle.num_experts)
        assert 1 <= routing.top_k <= handle.num_experts, (routing, handle.num_experts)
        return self._record("moe", [x, scores], x.width, handle, routing)

    def attention(
        self,
        plan: Input,
        kv: Input,
        layer: int,
        q: Recorded,
        k: Recorded,
        v: Recorded,
        scale: float,
    ) -> Recorded:
        return self._record("attention", [q, k, v], q.width, plan, kv, layer, scale)

    def _record(self, kind: str, inputs: list[Recorded], width: int, *arguments: Any) -> Recorded:
        recording = self._recorder.recording
        assert recording is not None, f"{kind} outside a compiled function"
        return recording.add(kind, inputs, width, *arguments)

    def _kept_format(self, weight: StoredTensor) -> str:
        if self._weight_format is not None:
            return self._weight_format
        if weight.format in _NO_KERNEL:
            logger.warning("%s: %s has no kernel: kept as float32", weight.name, weight.format)
            return "f32"
        return weight.format

    def _pack(self, tensors: Sequence[StoredTensor], kept: str, bias: torch.Tensor | None) -> Any:
        num_outputs = sum(tensor.shape[0] for tensor in tensors)
        num_inputs = tensors[0].shape[1]
        assert bias is None or (bias.shape == (num_outputs,) and bias.dtype == torch.float32)
        address = 0 if bias is None else bias.data_ptr()
        packed = _core.make_weight(self._arena, kept, num_outputs, num_inputs, address)
        row_bytes = _core.row_bytes(kept, num_inputs)
        panels = max(1, _CHUNK_BYTES // (row_bytes * _core.TILE))
        chunk = np.empty((panels * _core.TILE, row_bytes), np.uint8)
        panel = filled = 0
        finite = True

        def flush() -> None:
            nonlocal panel, filled, finite
            finite &= packed.pack_rows(self.context, panel, chunk.ctypes.data, row_bytes, filled)
            panel, filled = panel + panels, 0

        for tensor in tensors:
            start = 0
            while start < tensor.shape[0]:
                stop = min(tensor.shape[0], start + len(chunk) - filled)
                chunk[filled : filled + stop - start] = _stored_rows(tensor, kept, start, stop)
                filled += stop - start
                start = stop
                if filled == len(chunk):
                    flush()
            tensor.release()
        if filled:
            flush()
        if not finite:
            for tensor in tensors:
                tensor.read()  # raises, naming the tensor and the place
            raise AssertionError("the kernels found a value that is not finite")
        return packed


def _stored_rows(tensor: StoredTensor, kept: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Rows of the tensor in the format ``kept``, as bytes. ValueError naming the tensor if a value
    is not finite, or if float16 can't hold it."""
    if kept == tensor.format:
        return tensor.read_raw(start, stop)
    values = tensor.read(start, stop)
    if kept == "f32":
        return _bytes(values)
    dtype = next(dtype for dtype, name in _FLOATS.items() if name == kept)
    rounded = values.to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(rounded).all()):
        raise ValueError(
            f"{tensor.name} holds a value that float16 can't hold: use bfloat16 or float32"
        )
    return _bytes(rounded)


def _pages(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory straight from the system, in large pages where it has them: a long context touches so
    many pages that looking up small ones costs more than reading them."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


def _bytes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    result: npt.NDArray[np.uint8] = values.contiguous().view(torch.uint8).numpy()
    return result


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
