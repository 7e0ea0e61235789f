"""``eyas bench``: measure, write JSON, and render the JSON as documentation."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from eyas.cli.arguments import positive

NAME = "bench"
HELP = "measure speed and memory beside transformers; write JSON"
DESCRIPTION = (
    "Measure a workload beside transformers on the same weights and print JSON, or `report`:"
    " render benchmarks/results/*.json as docs/benchmarks.md and README.md's table."
)
WORKLOADS = ("decode", "prefill", "batch", "spec", "memory", "all", "report")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command's flags."""
    parser.add_argument("workload", choices=WORKLOADS, help="what to measure, or report")
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="write the JSON here; into a directory as MODEL-N-cores.json (default: print it)",
    )
    parser.add_argument("--model", default="demo", metavar="NAME", help="as in eyas generate")
    parser.add_argument("--num-threads", type=positive, metavar="N", help="default: all cores")
    parser.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="timed runs of each side"
    )
    parser.add_argument(
        "--num-spec-tokens", type=positive, default=4, metavar="K", help="tokens per draft"
    )
    parser.add_argument(
        "--prompts-per-category", type=positive, default=2, metavar="N", help="for spec; up to 4"
    )
    parser.add_argument(
        "--root", default=".", metavar="DIR", help="for report: the clone to write documents in"
    )


def run(args: argparse.Namespace) -> int:
    """Measure or report."""
    if args.workload == "report":
        return _report(Path(args.root))

    from eyas.bench.machine import available_cores
    from eyas.bench.workloads import NAMES, BenchOptions
    from eyas.bench.workloads import run as run_workloads

    options = BenchOptions(
        model=args.model,
        threads=args.num_threads or available_cores(),
        repeats=args.repeats,
        num_spec_tokens=args.num_spec_tokens,
        prompts_per_category=args.prompts_per_category,
    )
    names = NAMES if args.workload == "all" else (args.workload,)
    result = run_workloads(names, options, _prompts_by_category())
    text = json.dumps(result, indent=1) + "\n"
    if args.output is None:
        print(text, end="")
        return 0
    path = _result_path(Path(args.output), result)
    path.write_text(text)
    print(path, file=sys.stderr)
    return 0


def _result_path(output: Path, result: dict[str, Any]) -> Path:
    if not output.is_dir():
        return output
    model = Path(result["model"]).name
    return output / f"{model}-{result['machine']['cores']}-cores.json"


def _prompts_by_category() -> dict[str, list[str]]:
    from eyas.cli.datasets import load_prompts

    by_category: dict[str, list[str]] = {}
    for prompt in load_prompts(None):
        by_category.setdefault(str(prompt.category), []).append(prompt.text)
    return by_category


def _report(root: Path) -> int:
    from eyas.bench.report import documents

    readme = root / "README.md"
    texts = documents(root / "benchmarks" / "results", readme)
    (root / "docs" / "benchmarks.md").write_text(texts["benchmarks"], encoding="utf-8")
    readme.write_text(texts["readme"], encoding="utf-8")
    print("wrote docs/benchmarks.md and README.md", file=sys.stderr)
    return 0
