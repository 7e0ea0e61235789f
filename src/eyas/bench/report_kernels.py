"""The report's sections on kernels, and on what a step costs beside them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.bench.report_tables import limits, machine_name, model_name, origin, table

_LAYER = ("qkv", "attention_out", "gate_up", "down")
_ATTENTION_ROWS = (1, 4, 8, 64, 512)

Group = Mapping[str, Any]


def kernel_table(run: Mapping[str, Any]) -> str:
    """Every timing: for a terminal."""
    lines = [limits(run)]
    for group in run["groups"]:
        lines.append(str(group["name"]))
        for timing in group["timings"]:
            seconds = timing["seconds"]
            lines.append(
                f"  M {timing['rows']:>4} {seconds * 1e6:>10.1f} us"
                f" {timing['bytes'] / seconds / 1e9:>7.1f} GB/s {_read_share(run, timing):>4.0%}"
                f" {timing['operations'] / seconds / 1e9:>7.1f} G/s"
                f" {_peak_share(run, group, timing):>4.0%}"
                f"{'' if timing['cold'] else '  (not cold)'}"
            )
    return "\n".join(lines)


def kernels_section(run: Mapping[str, Any]) -> str:
    """Summaries: a layer's matrices together, attention, and the kernels between them."""
    return "\n".join(_section(run))


def _section(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"## Kernels, on {machine_name(run)}\n"
    yield origin(run)
    heat = "one copy, which caches may hold" if run["hot"] else "cold"
    yield limits(run) + f"Instruction set {run['instruction_set']}; weights and KV are {heat}.\n"
    models = list(dict.fromkeys(group["model"] for group in run["groups"]))
    for model in models:
        yield f"### {model}: the matrices of one layer\n"
        yield _linear(run, [g for g in run["groups"] if g["model"] == model])
        yield f"### {model}: attention over a float16 cache\n"
        yield _attention(run, [g for g in run["groups"] if g["model"] == model])
        yield f"### {model}: the kernels between\n"
        yield _rowwise([g for g in run["groups"] if g["model"] == model])


def _linear(run: Mapping[str, Any], groups: Sequence[Group]) -> str:
    rows = []
    kinds = dict.fromkeys(
        (g["format"], g["activations"]) for g in groups if g["kernel"] == "linear"
    )
    for format, activations in kinds:
        matrices = [
            g
            for g in groups
            if g.get("layer") in _LAYER and (g["format"], g["activations"]) == (format, activations)
        ]
        layer = layer_totals(matrices)
        if len(matrices) < len(_LAYER) or 1 not in layer:
            continue
        one = layer[1]
        read = one["bytes"] / one["seconds"] / run["limits"]["read_bytes_per_s"]
        cost = [f"{layer[m]['seconds'] / one['seconds']:.2f}" if m in layer else "" for m in (4, 8)]
        peak = [
            f"{_peak_share(run, matrices[0], layer[m]):.0%}" if m in layer else ""
            for m in (8, 64, 512)
        ]
        micro = f"{one['seconds'] * 1e6:.0f}"
        rows.append((format.upper(), activations, micro, f"{read:.0%}", *cost, *peak))
    names = (
        *("weights", "activations", "M = 1, us", "of reading", "M = 4 / 1", "M = 8 / 1"),
        *("of peak, M = 8", "M = 64", "M = 512"),
    )
    return table(names, rows)


def layer_totals(groups: Sequence[Group]) -> dict[int, dict[str, float]]:
    """Seconds, bytes and operations of several matrices together, by number of rows, for the
    numbers of rows that all of them have."""
    totals: dict[int, dict[str, float]] = {}
    counts: dict[int, int] = {}
    for group in groups:
        for timing in group["timings"]:
            rows = timing["rows"]
            total = totals.setdefault(rows, {"seconds": 0.0, "bytes": 0, "operations": 0})
            counts[rows] = counts.get(rows, 0) + 1
            for name in total:
                total[name] += timing[name]
    return {rows: total for rows, total in totals.items() if counts[rows] == len(groups)}


def _attention(run: Mapping[str, Any], groups: Sequence[Group]) -> str:
    rows = []
    for group in groups:
        if group["kernel"] != "attention":
            continue
        by_rows = {timing["rows"]: timing for timing in group["timings"]}
        micro = [
            f"{by_rows[m]['seconds'] * 1e6:.0f}" if m in by_rows else "" for m in _ATTENTION_ROWS
        ]
        most = by_rows[max(by_rows)]
        shares = (
            f"{_read_share(run, by_rows[1]):.0%}",
            f"{_peak_share(run, group, most):.0%} (M = {most['rows']})",
        )
        rows.append((str(group["context"]), *micro, *shares))
    names = ("context", *(f"M = {m}, us" for m in _ATTENTION_ROWS), "of reading, M = 1", "of peak")
    return table(names, rows)


def _rowwise(groups: Sequence[Group]) -> str:
    chosen = [g for g in groups if g["kernel"] not in ("linear", "attention")]
    sizes = [timing["rows"] for timing in chosen[0]["timings"]] if chosen else []
    rows = [
        (group["kernel"], *(f"{timing['seconds'] * 1e6:.1f}" for timing in group["timings"]))
        for group in chosen
    ]
    return table(("kernel", *(f"M = {m}, us" for m in sizes)), rows)


def _read_share(run: Mapping[str, Any], timing: Mapping[str, Any]) -> float:
    return float(timing["bytes"] / timing["seconds"] / run["limits"]["read_bytes_per_s"])


def _peak_share(run: Mapping[str, Any], group: Group, timing: Mapping[str, Any]) -> float:
    kind = "int8_mac_per_s" if group.get("activations") == "int8" else "float_mac_per_s"
    return float(timing["operations"] / timing["seconds"] / run["limits"][kind])


def overhead_section(run: Mapping[str, Any]) -> str:
    """Where a decode step's time goes."""
    step = run["step"]
    parts = [(f"kernel: {kind}", spent) for kind, spent in run["kernels"].items()]
    parts.sort(key=lambda part: -part[1])
    parts += [
        ("the batch, sampling, verification", run["sampling"]),
        ("scheduling, text, outputs", run["engine"]),
    ]
    rows = [
        (name, f"{spent * 1e6:.0f}", f"{spent / step:.1%}")
        for name, spent in parts
        if spent / step >= 5e-4
    ]
    rows.append(("all", f"{step * 1e6:.0f}", "100%"))
    text = (
        f"A step of `LLM.generate` takes {step * 1e3:.2f} ms (one request, the mean of"
        f" {run['output_tokens'] - 1} steps after {run['prompt_tokens']} tokens, median of"
        f" {run['repeats']} runs); {run['overhead']:.1%} of it is outside the native programs.\n"
    )
    return "\n".join(
        (
            f"## A decode step of {model_name(run)}, on {machine_name(run)}\n",
            origin(run),
            limits(run),
            text,
            table(("part", "us", "share"), rows),
        )
    )
