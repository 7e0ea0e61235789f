"""The report's section on a run beside other engines."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from eyas.bench.report_tables import (
    PEER_NAMES,
    decode_bound,
    limits,
    machine_name,
    mib,
    model_name,
    origin,
    table,
)


def peers_section(run: Mapping[str, Any]) -> str:
    """One model file: rates and ratios, the cost of a forward of several tokens, memory."""
    return "\n".join(_section(run))


def best_rates(run: Mapping[str, Any], workload: str, metric: str) -> dict[str, float]:
    """Of each engine that ran the workload, the median of its best variant."""
    rates: dict[str, float] = {}
    for name, entry in run["workloads"][workload]["engines"].items():
        if entry[metric] is not None:
            peer = run["variants"][name]["peer"]
            rates[peer] = max(rates.get(peer, 0.0), float(entry[metric]))
    return rates


def _section(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {model_name(run)} beside other engines, on {machine_name(run)}\n"
    yield origin(run)
    yield limits(run)
    yield _rates(run)
    if "forward" in run["workloads"]:
        yield "### The cost of a forward of m tokens, with all logits\n"
        yield _forward(run["workloads"]["forward"])
    if "memory" in run["workloads"]:
        yield "### Peak memory of one request\n"
        yield _memory(run)
    yield "### Versions and settings\n"
    yield _settings(run)


def _rates(run: Mapping[str, Any]) -> str:
    lines = list(_lines(run))
    peers = [p for p in PEER_NAMES if any(p in rates for _, rates, _ in lines)]
    others = [peer for peer in peers if peer != "eyas"]
    rows = []
    for name, rates, share in lines:
        ours = rates.get("eyas", math.nan)
        cells = [f"{rates[peer]:.1f}" if peer in rates else "" for peer in peers]
        ratios = [f"{ours / rates[peer]:.2f}" if peer in rates else "" for peer in others]
        rows.append((name, *cells, *ratios, share))
    names = (
        "tokens per second",
        *(PEER_NAMES[peer] for peer in peers),
        *(f"Eyas / {PEER_NAMES[peer]}" for peer in others),
        "of the bound",
    )
    return table(names, rows)


def _lines(run: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float], str]]:
    """What was measured, each engine's rate, and Eyas's share of the bandwidth bound."""

    def decode(workload: str, label: str) -> tuple[str, dict[str, float], str]:
        entry = run["workloads"][workload]
        context = entry["prompt_tokens"] + entry["output_tokens"] / 2
        rates = best_rates(run, workload, "tok_per_s")
        return label, rates, f"{rates['eyas'] / decode_bound(run, context):.0%}"

    for name, entry in run["workloads"].items():
        if name in ("forward", "memory"):
            continue
        length = entry["prompt_tokens"]
        if name == "decode":
            yield decode(name, "decode, 1 request")
        elif name == "prefill":
            yield f"prefill, {length} tokens", best_rates(run, name, "tok_per_s"), ""
        elif name.startswith("context"):
            rates = best_rates(run, name, "prefill_tok_per_s")
            yield f"prefill, {length} tokens", rates, ""
            yield decode(name, f"decode after {length} tokens")
        else:
            count = f"{entry['requests']} requests"
            size = f"{length} + {entry['output_tokens']} tokens each"
            whole = best_rates(run, name, "tok_per_s")
            yield f"{count}, {size}, output rate", whole, ""
            yield f"{count}, decode alone", best_rates(run, name, "decode_tok_per_s"), ""


def _forward(entry: Mapping[str, Any]) -> str:
    engines = entry["engines"]
    sizes = [m for m in engines["eyas"] if m != "runs"]
    names = ["m"]
    for name in engines:
        names += [f"{name}, ms", "/ m = 1"]
    rows = []
    for m in sizes:
        row = [m]
        for times in engines.values():
            row += [f"{times[m] * 1e3:.2f}", f"{times[m] / times['1']:.2f}"]
        rows.append(row)
    note = f"After {entry['context_tokens']} tokens of context.\n"
    return table(names, rows) + "\n" + note


def _memory(run: Mapping[str, Any]) -> str:
    memory = run["workloads"]["memory"]
    rows = [(name, mib(peak)) for name, peak in memory["peak"].items()]
    weights, kv = run["size"]["weight_bytes"], memory["kv_cache_memory"]
    rest = memory["peak"]["eyas"] - memory["import_torch"] - weights
    note = (
        f"`import torch` alone takes {mib(memory['import_torch'])} and the weights are"
        f" {mib(weights)}: Eyas has {mib(rest)} beside them, KV included (which may grow to the"
        f" {mib(kv)} that it was given).\n"
    )
    return table(("engine", "peak resident"), rows) + "\n" + note


def _settings(run: Mapping[str, Any]) -> str:
    lines = []
    for name, variant in run["variants"].items():
        if name == "eyas":
            continue
        versions = ", ".join(f"{k} {v}" for k, v in variant.get("versions", {}).items())
        settings = variant.get("settings", variant.get("options", {}))
        chosen = ", ".join(f"{key} {value}" for key, value in settings.items())
        lines.append(f"* {name}: {versions}; {chosen}\n")
    for name, reason in _failures(run):
        lines.append(f"* {name}: {reason}\n")
    if "llama_cpp_search" in run:
        tried = len(run["llama_cpp_search"])
        lines.append(f"* llama.cpp's settings are the best of {tried} tried on this file.\n")
    idle = max((w.get("busiest_idle", 0.0) for w in run["workloads"].values()), default=0.0)
    lines.append(
        f"* While one process ran, all the others together used at most {idle:.0%} of a core.\n"
    )
    return "".join(lines)


def _failures(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, reason in run["failed"].items():
        yield name, f"did not load this file: {_short(reason)}"
    for workload, entry in run["workloads"].items():
        for name, reason in entry.get("failed", {}).items():
            yield name, f"failed at {workload}: {_short(reason)}"


def _short(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= 200 else text[:200] + " ..."
