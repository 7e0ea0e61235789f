"""``eyas bench kernels``: the time of each kernel by itself, beside what the machine could do.

A kernel runs through the same recorded programs as in a model, and its time is what the program's
own clock says, barriers included. Weights, keys and values are cold, as they are in a real step: a
program goes through so many copies that the last-level cache holds less than an eighth of them
(fewer where arithmetic takes far longer than reading); ``hot`` uses one copy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from eyas.bench.kernel_shapes import SHAPES, ModelShape, RandomWeight
from eyas.bench.machine import facts, last_level_cache, measure_limits
from eyas.bench.rounds import say
from eyas.ops.base import AttentionSpan, KVShape
from eyas.ops.native import ActivationType, NativeOps

FLOAT_FORMATS = ("f32", "f16", "bf16")
FORMATS = (
    *FLOAT_FORMATS,
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *("q4_k", "q5_k", "q6_k"),
)
ROWS = (1, 2, 4, 8, 16, 64, 512)
CONTEXTS = (64, 512, 4096, 16384)
_SUPERBLOCK = 256
_HEAD_ROWS = 16  # logits are wanted of few rows
_ENOUGH_OPERATIONS = 4e9  # per pass, where copies are many
_HOT_CALLS = 16
_CALLS = 32  # of a kernel without weights
_BLOCK_SIZE = 16
_COLD_CACHES = 8

Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """``repeats`` timed passes after one to warm up."""

    threads: int
    repeats: int
    models: Sequence[str]
    formats: Sequence[str]
    hot: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel call of ``rows`` rows: ``bytes`` of weights (or keys and values, or activations)
    that it reads, ``operations`` multiply-adds, of int8 or of float32. ``copies`` were cycled
    through; ``cold``: the last-level cache holds less than an eighth of them."""

    rows: int
    seconds: float
    bytes: int
    operations: int
    copies: int
    cold: bool


def run(options: KernelOptions, earlier: dict[str, Any] | None, save: Save) -> dict[str, Any]:
    """Every kernel's timings; ``save`` gets everything so far after each group of them.

    ``earlier`` is an interrupted run's result: the groups that it has are not timed again.
    """
    result = earlier or _beginning(options)
    groups = {group["name"] for group in result["groups"]}
    for name, facts_of_group, time_group in _groups(options):
        if name in groups:
            continue
        say(name)
        timings = [asdict(timing) for timing in time_group()]
        result["groups"].append({"name": name, **facts_of_group, "timings": timings})
        save(result)
    return result


def _beginning(options: KernelOptions) -> dict[str, Any]:
    say("machine limits")
    result = {"kind": "kernels"} | facts(options.threads)
    return result | {
        "limits": measure_limits(options.threads),
        "last_level_cache": last_level_cache(),
        "instruction_set": NativeOps(num_threads=options.threads).context.instruction_set,
        "repeats": options.repeats,
        "hot": options.hot,
        "groups": [],
    }


_Group = tuple[str, dict[str, Any], Callable[[], Iterator[Timing]]]


def _groups(options: KernelOptions) -> Iterator[_Group]:
    """Name, description and the work of each group of timings."""
    for model in options.models:
        shape = SHAPES[model]
        for format in options.formats:
            kinds: tuple[ActivationType, ...] = ("int8", "float32")
            for activations in ("float32",) if format in FLOAT_FORMATS else kinds:
                for layer, (num_outputs, num_inputs) in shape.linear.items():
                    if format.endswith("_k") and num_inputs % _SUPERBLOCK:
                        continue
                    described = {
                        "kernel": "linear",
                        "model": model,
                        "layer": layer,
                        "outputs": num_outputs,
                        "inputs": num_inputs,
                        "format": format,
                        "activations": activations,
                    }
                    name = f"linear {model} {layer} {format} x {activations}"
                    yield name, described, _linear(options, described)
        for context in CONTEXTS:
            described = {"kernel": "attention", "model": model, "context": context, "kv": "f16"}
            yield f"attention {model} {context}", described, _attention(options, shape, context)
        for kernel, work in (("norm", _norm), ("silu_mul", _silu_mul), ("rope", _rope)):
            described = {"kernel": kernel, "model": model}
            yield f"{kernel} {model}", described, work(options, shape)


def _linear(options: KernelOptions, group: dict[str, Any]) -> Callable[[], Iterator[Timing]]:
    def time_group() -> Iterator[Timing]:
        outputs, inputs, format = group["outputs"], group["inputs"], group["format"]
        ops = NativeOps(activation_dtype=group["activations"], num_threads=options.threads)
        weight = RandomWeight(outputs, inputs, format)
        handles = [ops.pack_linear([weight], None)]
        size = sum(part.packed.nbytes for part in handles[0].parts)
        enough = 1 if options.hot else _cold_copies(size)
        handles += [ops.pack_linear([weight], None) for _ in range(enough - 1)]
        for rows in ROWS:
            if group["layer"] == "head" and rows > _HEAD_ROWS:
                break
            operations = rows * outputs * inputs
            copies = min(enough, _affordable(operations))
            chosen = handles[:copies] * (_HOT_CALLS if options.hot else 1)

            def function(x: Any, chosen: list[Any] = chosen) -> Any:
                for handle in chosen:
                    y = ops.linear(handle, x)
                return y

            x = _random(rows, inputs)
            seconds = _seconds(ops, function, [x], ("linear",), len(chosen), options.repeats)
            cold = not options.hot and copies == enough
            yield Timing(rows, seconds, size, operations, copies, cold)

    return time_group


def _attention(
    options: KernelOptions, shape: ModelShape, context: int
) -> Callable[[], Iterator[Timing]]:
    def time_group() -> Iterator[Timing]:
        ops = NativeOps(num_threads=options.threads)
        one = shape.attention
        width = one.num_kv_heads * one.head_dim
        size = 2 * context * width * 2  # keys and values of two bytes
        enough = 1 if options.hot else _cold_copies(size)
        num_blocks = context // _BLOCK_SIZE
        kv = ops.allocate_kv(
            KVShape(enough, num_blocks, _BLOCK_SIZE, one.num_kv_heads, one.head_dim), torch.float16
        )
        for layer in kv.layers:  # untouched pages would all be the same one
            layer.keys[...] = 0.5
            layer.values[...] = 0.5
        blocks = tuple(int(b) for b in np.random.default_rng(0).permutation(num_blocks))
        for rows in ROWS:
            if rows > context:
                break
            first = context - rows
            seen = sum(range(first + 1, context + 1))
            operations = 2 * seen * one.num_query_heads * one.head_dim
            copies = min(enough, _affordable(operations))
            chosen = [*range(copies)] * (_HOT_CALLS if options.hot else 1)

            def function(
                q: Any, k: Any, v: Any, plan: Any, cache: Any, chosen: list[int] = chosen
            ) -> Any:
                for layer in chosen:
                    out = ops.attention(plan, cache, layer, q, k, v, 0.125)
                return out

            plan = ops.plan_attention(one, [AttentionSpan(0, rows, first, 0, blocks)], _BLOCK_SIZE)
            q = _random(rows, one.num_query_heads * one.head_dim)
            k, v = _random(rows, width), _random(rows, width)
            kinds = ("write_kv", "attention", "merge")
            seconds = _seconds(
                ops, function, [q, k, v, plan, kv], kinds, len(chosen), options.repeats
            )
            cold = not options.hot and copies == enough
            yield Timing(rows, seconds, size, operations, copies, cold)

    return time_group


def _norm(options: KernelOptions, shape: ModelShape) -> Callable[[], Iterator[Timing]]:
    """RMSNorm, and quantising its result for an int8 layer."""
    hidden = shape.hidden_size

    def time_group() -> Iterator[Timing]:
        ops = NativeOps(num_threads=options.threads)
        reader = ops.pack_linear([RandomWeight(16, hidden, "q8_0")], None)
        weight = torch.ones(hidden)

        def function(x: Any) -> Any:
            for _ in range(_CALLS):
                y = ops.linear(reader, ops.rms_norm(x, weight, 1e-5))
            return y

        yield from _rowwise(ops, function, "norm", hidden, options.repeats)

    return time_group


def _silu_mul(options: KernelOptions, shape: ModelShape) -> Callable[[], Iterator[Timing]]:
    """silu(gate) * up, and quantising it for an int8 layer."""
    size = shape.intermediate_size

    def time_group() -> Iterator[Timing]:
        ops = NativeOps(num_threads=options.threads)
        reader = ops.pack_linear([RandomWeight(16, size, "q8_0")], None)

        def function(x: Any) -> Any:
            for _ in range(_CALLS):
                y = ops.linear(reader, ops.silu_mul(x))
            return y

        yield from _rowwise(ops, function, "silu_mul", 2 * size, options.repeats)

    return time_group


def _rope(options: KernelOptions, shape: ModelShape) -> Callable[[], Iterator[Timing]]:
    one = shape.attention
    width = (one.num_query_heads + one.num_kv_heads) * one.head_dim

    def time_group() -> Iterator[Timing]:
        ops = NativeOps(num_threads=options.threads)
        inv_freq = torch.full((one.head_dim // 2,), 0.01)

        def function(x: Any, positions: Any) -> Any:
            angles = ops.angles(inv_freq, positions)
            for _ in range(_CALLS):
                x = ops.rope(x, angles)
            return x

        yield from _rowwise(ops, function, "rope", width, options.repeats, positions=True)

    return time_group


def _rowwise(
    ops: NativeOps,
    function: Callable[..., Any],
    kind: str,
    width: int,
    repeats: int,
    positions: bool = False,
) -> Iterator[Timing]:
    for rows in ROWS:
        arguments: list[Any] = [_random(rows, width)]
        if positions:
            arguments.append(np.arange(rows, dtype=np.int64))
        seconds = _seconds(ops, function, arguments, (kind,), _CALLS, repeats)
        yield Timing(rows, seconds, rows * width * 4, rows * width, 1, False)


def _seconds(
    ops: NativeOps,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    kinds: Sequence[str],
    calls: int,
    repeats: int,
) -> float:
    """The median time of one of ``calls`` kernel calls, of the given kinds in the profile."""
    compiled = ops.compile(function)
    compiled(*arguments)
    compiled.program.set_profiling(True)

    def spent() -> float:
        costs = compiled.program.profile()
        return float(sum(seconds for kind, _, seconds in costs if kind in kinds))

    passes = []
    for _ in range(repeats + 1):
        before = spent()
        compiled(*arguments)
        passes.append((spent() - before) / calls)
    return median(passes[1:])


def _cold_copies(size: int) -> int:
    return _COLD_CACHES * last_level_cache() // size + 2


def _affordable(operations: int) -> int:
    return max(2, int(_ENOUGH_OPERATIONS / operations))


def _random(rows: int, width: int) -> Any:
    return np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
