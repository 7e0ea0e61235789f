"""The report's section on a run beside transformers, and on speculation."""

from collections.abc import Iterator
from typing import Any

from eyas.bench.report_tables import (
    decode_bound,
    limits,
    machine_name,
    mib,
    model_name,
    origin,
    table,
)


def workloads_section(run: dict[str, Any]) -> str:
    """One run: its machine, then a table per workload."""
    return "\n".join(_section(run))


def _section(run: dict[str, Any]) -> Iterator[str]:
    yield f"## {model_name(run)} beside transformers, on {machine_name(run)}\n"
    yield origin(run)
    yield limits(run)
    rows = list(_compared(run))
    if rows:
        yield table(("workload", "Eyas tok/s", "transformers tok/s", "ratio", "of the bound"), rows)
    if "spec" in run:
        yield _speculation(run["spec"])
    if "memory" in run:
        yield "### Peak memory\n"
        yield table(
            ("engine", "peak resident", "of transformers"),
            [
                (name, mib(value), f"{value / run['memory']['transformers']:.2f}")
                for name, value in run["memory"].items()
            ],
        )


def _compared(run: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    def row(name: str, entry: dict[str, Any], share: str = "") -> tuple[str, ...]:
        rates = (f"{entry[engine]['tok_per_s']:.1f}" for engine in ("eyas", "transformers"))
        return (name, *rates, f"{entry['ratio']:.2f}", share)

    if "decode" in run:
        entry = run["decode"]
        share = f"{entry['eyas']['tok_per_s'] / decode_bound(run):.0%}"
        yield row(f"decode, 1 request, {entry['output_tokens']} tokens", entry, share)
    for entry in run.get("prefill", []):
        yield row(f"prefill, {entry['prompt_tokens']} tokens", entry)
    if "batch" in run:
        entry = run["batch"]
        size = f"{entry['prompt_tokens']} + {entry['output_tokens']} tokens each"
        yield row(f"{entry['requests']} requests, {size}, output rate", entry)


def _speculation(spec: dict[str, Any]) -> str:
    head = (
        f"### Speculation: {spec['method']}, {spec['num_spec_tokens']} tokens per draft\n\n"
        "Acceptance length is 1 + accepted tokens / drafts; steps without a draft don't count in"
        " it. Both sides give the same tokens, which the run checks.\n\n"
    )
    rows = [
        (
            row["category"],
            f"{row['acceptance_length']:.2f}",
            f"{row['plain_tok_per_s']:.1f}",
            f"{row['tok_per_s']:.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in spec["categories"]
    ]
    rows.append(("all", f"{spec['acceptance_length']:.2f}", "", "", f"{spec['ratio']:.2f}"))
    names = ("category", "acceptance length", "plain tok/s", "speculative tok/s", "ratio")
    return head + table(names, rows)
