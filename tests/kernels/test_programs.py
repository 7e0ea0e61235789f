"""Recorded programs: whatever is fused or shares a buffer, the bits are those of separate steps."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from attention_cases import SCALE
from bits import random, same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from implementations import ALL, FLOAT, INT8, REFERENCE, THREADS, Family, compiled
from in_memory import InMemoryTensor
from stored_weights import random_weight

from eyas import _core
from eyas.ops.base import AttentionShape, AttentionSpan, KVCache, KVShape, Ops
from eyas.ops.native import NativeOps

NAMES = {"ids": lambda value: getattr(value, "name", None)}
WIDTH = 64


class Separately:
    """The same ops, each of them a program of its own: nothing to fuse, no buffer to share."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(self, handle: Any, x: torch.Tensor) -> torch.Tensor:
        return compiled(self._ops, lambda x: self._ops.linear(handle, x))(x)

    def embed(self, handle: Any, ids: torch.Tensor) -> torch.Tensor:
        return compiled(self._ops, lambda ids: self._ops.embed(handle, ids))(ids)

    def split(self, x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(part.contiguous() for part in x.split(list(widths), dim=1))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return compiled(self._ops, self._ops.add)(x, y)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return compiled(self._ops, lambda x: self._ops.rms_norm(x, weight, eps))(x)

    def angles(self, inv_freq: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inv_freq, at

    def rope(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inv_freq, positions = angles
        turn = compiled(self._ops, lambda x, at: self._ops.rope(x, self._ops.angles(inv_freq, at)))
        return turn(x, positions)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return compiled(self._ops, self._ops.silu_mul)(gate_up)

    def attention(
        self, plan: Any, kv: KVCache, layer: int, q: Any, k: Any, v: Any, scale: float
    ) -> torch.Tensor:
        return compiled(
            self._ops,
            lambda plan, kv, q, k, v: self._ops.attention(plan, kv, layer, q, k, v, scale),
        )(plan, kv, q, k, v)


@pytest.mark.parametrize("family", [*ALL, *INT8], **NAMES)
@pytest.mark.parametrize("format", ["f32", "q8_0", "q4_k"])
def test_a_residual_is_added_with_the_bits_of_separate_steps(family: Family, format: str) -> None:
    x, scales = random(11, 256), random(256, seed=1)
    for count in THREADS:
        ops = family.at(count)
        handle = ops.pack_linear([random_weight(format, 256, 256)], random(256, seed=2))

        def layer(ops: Any, x: Any, handle: Any = handle) -> Any:
            return ops.add(x, ops.linear(handle, ops.rms_norm(x, scales, 1e-5)))

        def three(ops: Any, x: Any, layer: Callable[[Any, Any], Any] = layer) -> Any:
            return layer(ops, layer(ops, layer(ops, x)))

        for function in (layer, three):
            fused = compiled(ops, lambda x, ops=ops, function=function: function(ops, x))
            wanted = function(Separately(ops), x)
            assert same_bits(fused(x), wanted)
            assert same_bits(fused(x[3:4]), wanted[3:4])  # the same program, once more
            assert same_bits(fused(x.flip(0)), wanted.flip(0))


SHAPE = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=16, window=None)


@dataclass(frozen=True)
class TinyModel:
    """Three layers, that mix the ops as a model does and read old values late."""

    table: Any
    layers: tuple[tuple[Any, ...], ...]

    def __call__(self, ops: Any, ids: Any, at: Any, plan: Any, kv: Any) -> Any:
        first = x = ops.embed(self.table, ids)
        inv_freq = 100.0 ** -(torch.arange(8) / 8)
        angles = ops.angles(inv_freq, at)
        kept = []
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            normed = ops.rms_norm(x, random(WIDTH, seed=i), 1e-5)
            q, k, v = ops.split(ops.linear(qkv, normed), [64, 32, 32])
            q = ops.rope(ops.rms_norm(q, random(16, seed=i + 3), 1e-5), angles)
            k = ops.rope(k, angles)
            mixed = ops.attention(plan, kv, i, q, k, v, SCALE)
            x = ops.add(x, ops.linear(out, mixed))
            gated = ops.silu_mul(ops.linear(gate_up, ops.rms_norm(x, random(WIDTH, seed=7), 1e-5)))
            kept.append(ops.add(mixed, normed))
            x = ops.add(x, ops.linear(down, gated))
        for one in kept:
            x = ops.add(one, x)
        return ops.linear(self.table, ops.add(x, first))


def tiny_model(ops: Ops, formats: Sequence[str]) -> TinyModel:
    seed = 0

    def linear(num_outputs: int, num_inputs: int) -> Any:
        nonlocal seed
        seed += 1
        weight = random_weight(formats[seed % len(formats)], num_outputs, num_inputs, seed)
        values = weight.read()
        if weight.format == "f32":  # of usual sizes
            return ops.pack_linear([InMemoryTensor(values.sign() * values.abs().sqrt() / 30)], None)
        return ops.pack_linear([weight], random(num_outputs, seed=seed))

    layers = tuple(
        (linear(128, 64), linear(64, 64), linear(192, 64), linear(64, 96)) for _ in "abc"
    )
    return TinyModel(ops.pack_embedding(InMemoryTensor(random(50, WIDTH))), layers)


def forward(ops: Ops, call: Callable[..., torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """30 tokens in chunks of ``sizes``; a second request's tokens ride along in each of them."""
    kv = ops.allocate_kv(KVShape(3, 8, 16, 2, 16), torch.float16)
    ids = torch.arange(30) * 7 % 50
    rows, start = [], 0
    for size in sizes:
        at = torch.cat([torch.arange(start, start + size), torch.arange(2)])
        spans = [AttentionSpan(0, size, start, 0, (5, 2)), AttentionSpan(size, 2, 0, 0, (1,))]
        plan = ops.plan_attention(SHAPE, spans, 16)
        tokens = torch.cat([ids[start : start + size], torch.tensor([3, 4])])
        rows.append(call(tokens, at, plan, kv)[:size])
        start += size
    assert start == 30
    return torch.cat(rows)


def compiled_model(ops: Ops, model: TinyModel) -> Callable[..., torch.Tensor]:
    return compiled(ops, lambda *inputs: model(ops, *inputs))


@pytest.mark.parametrize("family", [*ALL, *INT8], **NAMES)
@pytest.mark.parametrize("formats", [("f32",), ("q8_0", "q5_1", "q4_0")])
def test_a_model_has_the_bits_of_its_steps(family: Family, formats: Sequence[str]) -> None:
    model, steps = tiny_model(family.at(1), formats), Separately(family.at(1))
    expected = forward(family.at(1), lambda *inputs: model(steps, *inputs), [30])
    assert expected.isfinite().all()
    for count in THREADS:
        ops = family.at(count)
        call = compiled_model(ops, tiny_model(ops, formats))
        for sizes in ([30], [1] * 30, [7, 1, 20, 2]):
            assert same_bits(forward(ops, call, sizes), expected)


@pytest.mark.parametrize("family", FLOAT, **NAMES)
@pytest.mark.parametrize("formats", [("f32",), ("q8_0", "q5_1", "q4_0")])
def test_a_model_is_near_the_reference(family: Family, formats: Sequence[str]) -> None:
    actual, expected = (
        forward(ops, compiled_model(ops, tiny_model(ops, formats)), [30])
        for ops in (family.at(2), REFERENCE.at(1))
    )
    # Keys and values are rounded to float16, now and then to the next one.
    assert (actual - expected).abs().max() < 2e-3 * expected.abs().max()


Step = tuple[str, int, int]


def build(ops: Any, steps: Sequence[Step], handles: Sequence[Any], x: Any, y: Any, at: Any) -> Any:
    """What the last step makes (not counting splits). A step's numbers choose its operands: 0 is
    the newest value, or the newest half of one."""
    angles = ops.angles(100.0 ** -(torch.arange(8) / 8), at)
    values = [x, y, ops.rms_norm(x, random(WIDTH, seed=1), 1e-5)]
    halves = list(ops.split(values[2], [32, 32]))
    result = values[2]
    for kind, first, second in steps:
        a, b = (values[-1 - i % len(values)] for i in (first, second))
        half, other = (halves[-1 - i % len(halves)] for i in (first, second))
        if kind == "split":
            halves.extend(ops.split(a, [32, 32]))
        elif kind == "unused":  # a value that is not what the function returns
            values.append(ops.add(a, b))
        elif kind == "rotate half":
            result = ops.rope(half, angles)
            halves.append(result)
        else:
            if kind == "add":
                result = ops.add(a, b)
            elif kind == "residual":
                result = ops.add(a, ops.linear(handles[0], b))
            elif kind == "linear":
                result = ops.linear(handles[1], a)
            elif kind == "norm":
                result = ops.rms_norm(a, random(16, seed=first), 1e-5)
            elif kind == "gate":
                result = ops.silu_mul(ops.linear(handles[2], a))
            elif kind == "rotate":
                result = ops.rope(a, angles)
            elif kind == "split half":
                quarters = ops.split(half, [16, 16])
                result = ops.linear(handles[4], quarters[second % 2])
            elif kind == "use half":
                result = ops.add(b, ops.linear(handles[3], half))
            elif kind == "add halves":
                result = ops.linear(handles[3], ops.add(half, other))
            values.append(result)
    return result


KINDS = ["add", "unused", "residual", "linear", "norm", "gate", "rotate", "split", "split"]
KINDS += ["rotate half", "rotate half", "split half", "use half", "use half", "add halves"]
OPERANDS = st.integers(0, 2) | st.integers(0, 9)


@pytest.mark.parametrize("family", [FLOAT[0], INT8[0]], **NAMES)
@settings(max_examples=300, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(KINDS), OPERANDS, OPERANDS), min_size=3, max_size=14))
# x + linear(x), where x is read for the last time.
@example([("add", 0, 1), ("residual", 0, 0), ("norm", 0, 0)])
# A half of a layer's output is read after its sum.
@example([("linear", 0, 0), ("linear", 2, 0), ("split", 0, 0), ("add", 1, 0), ("use half", 0, 0)])
# A layer's output is the result, although a sum that nobody reads follows.
@example([("linear", 0, 0), ("linear", 2, 0), ("unused", 1, 0)])
# A half is rotated for its last use, and then the whole is read.
@example([("linear", 0, 0), ("split", 0, 0), ("rotate half", 0, 0), ("add", 0, 0)])
# A half that was rotated is split again.
@example([("linear", 0, 0), ("split", 0, 0), ("rotate half", 0, 0), ("split half", 0, 1)])
# A half is read when the other one, rotated in its place, is forgotten.
@example([("linear", 0, 0), ("split", 0, 0), ("rotate half", 0, 0), ("use half", 0, 0),
          ("linear", 0, 0), ("linear", 0, 0), ("use half", 1, 0)])  # fmt: skip
# A rotated half is the result.
@example([("linear", 0, 0), ("split", 0, 0), ("rotate half", 0, 0)])
def test_any_function_has_the_bits_of_its_steps(family: Family, steps: Sequence[Step]) -> None:
    ops = family.at(1)
    handles, at = handles_of(family), torch.tensor([5, 0, 9])
    x, y = random(3, WIDTH), random(3, WIDTH, seed=1)
    expected = build(Separately(ops), steps, handles, x, y, at)
    x_before, y_before = x.clone(), y.clone()
    actual = compiled(ops, lambda x, y, at: build(ops, steps, handles, x, y, at))(x, y, at)
    assert same_bits(actual, expected)
    assert same_bits(x, x_before)
    assert same_bits(y, y_before)


@cache
def handles_of(family: Family) -> list[Any]:
    sizes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 32)]
    weights = [random_weight("q8_0", *size, seed=seed) for seed, size in enumerate(sizes)]
    weights.append(random_weight("f32", WIDTH, 16))
    return [family.at(1).pack_linear([weight], None) for weight in weights]


@pytest.mark.parametrize("family", INT8, **NAMES)
def test_a_program_grows_with_its_batch(family: Family) -> None:
    ops = family.at(3)
    handle = ops.pack_linear([random_weight("q6_k", 256, 256)], None)
    scales, x = random(256), random(70, 256, seed=1)
    call = compiled(ops, lambda x: ops.add(x, ops.linear(handle, ops.rms_norm(x, scales, 1e-5))))
    alone = torch.cat([call(x[i : i + 1]) for i in range(70)])
    assert call(x[:0]).shape == (0, 256)
    for count in (1, 2, 3, 5, 33, 70, 4, 1):
        assert same_bits(call(x[:count]), alone[:count])


@pytest.mark.parametrize("name", ["sse9", "neon" if "avx2" in _core.instruction_sets() else "avx2"])
def test_an_unknown_instruction_set_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_ISA", name)
    with pytest.raises(ValueError, match=f"instruction set '{name}'.*use one of .*baseline"):
        NativeOps()


def test_the_environment_names_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _core.instruction_sets():
        monkeypatch.setenv("EYAS_ISA", name)
        assert NativeOps(num_threads=1).context.instruction_set == name


def _run_in_child(call: Callable[..., torch.Tensor], x: torch.Tensor, pipe: Connection) -> None:
    try:
        pipe.send(call(x).tolist())
    except RuntimeError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_survive_a_fork(num_threads: int) -> None:
    ops = NativeOps(num_threads=num_threads)
    call, x = compiled(ops, ops.add), random(2, 3)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    expected = call(x, x)
    child = context.Process(target=_run_in_child, args=(lambda x: call(x, x), x, there))
    child.start()
    assert here.poll(30)
    answer = here.recv()
    child.join(30)
    assert child.exitcode == 0
    if num_threads == 1:
        assert answer == expected.tolist()
    else:
        assert "'spawn'" in answer
    assert same_bits(call(x, x), expected)
