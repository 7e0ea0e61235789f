"""The report's section on what int8 activations and a float16 KV cache change."""

from collections.abc import Mapping
from typing import Any

from eyas.bench.report_tables import machine_name, origin, table


def quality_section(run: Mapping[str, Any]) -> str:
    """Perplexities side by side."""
    ours = run["eyas"]
    rows = [
        ("float32 activations, float32 KV", f"{ours['reference_perplexity']:.4f}", ""),
        ("by default", f"{ours['perplexity']:.4f}", f"{ours['change']:+.3%}"),
    ]
    text = (
        f"{ours['tokens']} tokens of Python's own documentation in {run['windows']} windows of"
        f" {run['window']}, on the same weights. Mean divergence KL(float32 || default)"
        f" {ours['mean_kl']:.2e} nats a token; the most likely token is the same for"
        f" {ours['same_top_token']:.1%}.\n"
    )
    parts = [
        f"## Quality: {run['model']}, on {machine_name(run)}\n",
        origin(run),
        text,
        table(("Eyas", "perplexity", "change"), rows),
    ]
    if "transformers" in run:
        theirs = run["transformers"]
        parts.append(
            f"On the first {theirs['tokens']} tokens transformers, in float32 on the dequantised"
            f" weights, has {theirs['perplexity']:.4f}; Eyas has"
            f" {theirs['eyas_reference_perplexity']:.4f} in float32 and"
            f" {theirs['eyas_perplexity']:.4f} by default ({theirs['change']:+.3%}).\n"
        )
    return "\n".join(parts)
