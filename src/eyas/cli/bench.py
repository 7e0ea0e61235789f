"""``eyas bench``: measure, write JSON, and render the JSON as documentation."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eyas.cli.arguments import positive

NAME = "bench"
HELP = "measure speed, memory and quality; write JSON"
DESCRIPTION = (
    "decode, prefill, batch, spec, memory: beside transformers on the same weights. kernels: each"
    " kernel beside the machine's limits. overhead: a decode step's time outside the kernels."
    " quality: int8 activations against float32 ones. all: all of these. peers: beside llama.cpp,"
    " OpenVINO and vLLM, which benchmarks/peers/install.py installs. report: render"
    " benchmarks/results/*.json as docs/benchmarks.md and README.md's table."
)
_BESIDE_TRANSFORMERS = ("decode", "prefill", "batch", "spec", "memory")
_KINDS = ("kernels", "overhead", "quality")
WORKLOADS = (*_BESIDE_TRANSFORMERS, *_KINDS, "all", "peers", "report")

Save = Callable[[dict[str, Any]], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command's flags."""
    parser.add_argument("workload", choices=WORKLOADS, help="what to measure, or report")
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="write the JSON here after each step; into a directory under a name that says what it"
        " is (default: print it)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what an interrupted run left in --output"
    )
    parser.add_argument("--model", default="demo", metavar="NAME", help="as in eyas generate")
    parser.add_argument("--num-threads", type=positive, metavar="N", help="default: all cores")
    parser.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="timed runs of each side"
    )
    parser.add_argument(
        "--root", default=".", metavar="DIR", help="for peers and report: the clone of Eyas"
    )
    spec = parser.add_argument_group("spec")
    spec.add_argument(
        "--num-spec-tokens", type=positive, default=4, metavar="K", help="tokens per draft"
    )
    spec.add_argument(
        "--prompts-per-category", type=positive, default=2, metavar="N", help="up to 4"
    )
    kernels = parser.add_argument_group("kernels")
    kernels.add_argument(
        "--shapes", metavar="LIST", help="of these models: demo,llama-3.2-1b (default: both)"
    )
    kernels.add_argument("--formats", metavar="LIST", help="such as q4_1,bf16 (default: all)")
    kernels.add_argument(
        "--hot", action="store_true", help="one copy of the weights, which caches may hold"
    )
    quality = parser.add_argument_group("quality")
    quality.add_argument(
        "--num-tokens", type=positive, default=20_480, metavar="N", help="tokens of text"
    )
    quality.add_argument(
        "--transformers-windows",
        type=int,
        default=20,
        metavar="N",
        help="windows of 1024 tokens that transformers predicts too",
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--engines",
        metavar="LIST",
        help="of llama_cpp,openvino,vllm_cpu,transformers (default: all)",
    )
    peers.add_argument(
        "--only", metavar="LIST", help="of the workloads, such as decode,forward (default: all)"
    )
    peers.add_argument(
        "--long-repeats", type=positive, default=1, metavar="N", help="rounds of long contexts"
    )
    peers.add_argument("--peers-dir", metavar="DIR", help="default: ~/.cache/eyas/peers")
    peers.add_argument(
        "--hf-model", metavar="DIR", help="the same weights for vLLM; see make_safetensors.py"
    )


def run(args: argparse.Namespace) -> int:
    """Measure or report."""
    if args.workload == "report":
        return _report(Path(args.root))
    output = None if args.output is None else Path(args.output)
    for kind, names in _measurements(args.workload):
        _measure(kind, names, args, output)
    return 0


def _measurements(workload: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Kinds of result files, and the workloads that go into each."""
    if workload == "all":
        yield "workloads", _BESIDE_TRANSFORMERS
        yield from ((kind, ()) for kind in _KINDS)
    elif workload in _BESIDE_TRANSFORMERS:
        yield "workloads", (workload,)
    else:
        yield workload, ()


def _measure(
    kind: str, names: Sequence[str], args: argparse.Namespace, output: Path | None
) -> None:
    from eyas.bench import results
    from eyas.bench.machine import available_cores, facts
    from eyas.bench.model_size import main_format

    if args.workload == "all" and (output is None or not output.is_dir()):
        raise ValueError("all writes several files: give --output with a directory that exists")
    threads = args.num_threads or available_cores()
    model = None if kind == "kernels" else args.model
    path, earlier = output, None
    if output is not None and output.is_dir():
        format = "" if model is None else main_format(model)
        path = output / results.file_name(kind, model, format, available_cores())
    if args.resume:
        if path is None:
            raise ValueError("--resume goes on with a file: give --output")
        expected = {"kind": kind, **facts(threads), "repeats": args.repeats}
        del expected["date"]
        if model is not None:
            expected["model"] = model
        if kind == "kernels":
            expected["hot"] = args.hot
        if kind == "quality":
            del expected["repeats"]
        earlier = results.read_earlier(path, expected)

    def save(result: dict[str, Any]) -> None:
        if path is not None:
            results.write(path, result)

    result = _RUNNERS[kind](args, threads, names, earlier, save)
    if path is None:
        print(json.dumps(result, indent=1))
    else:
        print(path, file=sys.stderr)


_Earlier = dict[str, Any] | None


def _workloads(
    args: argparse.Namespace, threads: int, names: Sequence[str], earlier: _Earlier, save: Save
) -> dict[str, Any]:
    from eyas.bench.workloads import BenchOptions
    from eyas.bench.workloads import run as run_workloads

    options = BenchOptions(
        model=args.model,
        threads=threads,
        repeats=args.repeats,
        num_spec_tokens=args.num_spec_tokens,
        prompts_per_category=args.prompts_per_category,
    )
    return run_workloads(names, options, _prompts_by_category(), earlier, save)


def _kernels(
    args: argparse.Namespace, threads: int, names: Sequence[str], earlier: _Earlier, save: Save
) -> dict[str, Any]:
    from eyas.bench import kernels
    from eyas.bench.kernel_shapes import SHAPES
    from eyas.bench.report_kernels import kernel_table

    options = kernels.KernelOptions(
        threads=threads,
        repeats=args.repeats,
        models=_chosen("--shapes", args.shapes, tuple(SHAPES)),
        formats=_chosen("--formats", args.formats, kernels.FORMATS),
        hot=args.hot,
    )
    result = kernels.run(options, earlier, save)
    print(kernel_table(result), file=sys.stderr)
    return result


def _overhead(
    args: argparse.Namespace, threads: int, names: Sequence[str], earlier: _Earlier, save: Save
) -> dict[str, Any]:
    from eyas.bench import overhead

    return earlier or overhead.run(
        overhead.OverheadOptions(args.model, threads, args.repeats), save
    )


def _quality(
    args: argparse.Namespace, threads: int, names: Sequence[str], earlier: _Earlier, save: Save
) -> dict[str, Any]:
    from eyas.bench import quality

    options = quality.QualityOptions(
        args.model,
        threads,
        num_tokens=args.num_tokens,
        transformers_windows=args.transformers_windows,
    )
    return quality.run(options, earlier, save)


def _peers(
    args: argparse.Namespace, threads: int, names: Sequence[str], earlier: _Earlier, save: Save
) -> dict[str, Any]:
    from eyas.bench import peers

    options = peers.PeerOptions(
        model=args.model,
        threads=threads,
        repeats=args.repeats,
        long_repeats=args.long_repeats,
        engines=_chosen("--engines", args.engines, peers.ENGINES),
        root=Path(args.root),
        peers_dir=None if args.peers_dir is None else Path(args.peers_dir).expanduser(),
        hf_model=args.hf_model,
    )
    return peers.run(_chosen("--only", args.only, peers.WORKLOADS), options, earlier, save)


_RUNNERS = {
    "workloads": _workloads,
    "kernels": _kernels,
    "overhead": _overhead,
    "quality": _quality,
    "peers": _peers,
}


def _chosen(flag: str, text: str | None, known: Sequence[str]) -> Sequence[str]:
    """Names from a list with commas, in our order; all without one. ValueError for others."""
    if text is None:
        return known
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} has {name!r}: it takes a list of {', '.join(known)}")
    return [name for name in known if name in names]


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
