"""The workloads: what is run, in which order, and how repeats become numbers.

Every comparison alternates: repeat i of one side runs right beside repeat i of the other, in the
same run on the same machine, and the ratio is the median of the pairs' ratios.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from eyas.bench.machine import facts
from eyas.bench.model_size import main_format, model_size
from eyas.bench.prompts import random_prompt
from eyas.bench.rounds import ratio, say, summary, take_turns
from eyas.bench.worker import Worker

NAMES = ("decode", "prefill", "batch", "spec", "memory")
PEERS = ("eyas", "transformers")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """``repeats`` timed runs of each side after one to warm up; ``prompts_per_category`` and
    ``answer_tokens`` size the speculation workload."""

    model: str
    threads: int
    repeats: int = 5
    num_spec_tokens: int = 4
    prompts_per_category: int = 2
    answer_tokens: int = 96


def run(
    names: Sequence[str],
    options: BenchOptions,
    prompts: Mapping[str, Sequence[str]],
    earlier: dict[str, Any] | None,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The named workloads' results, with everything needed to judge them, as plain values.

    ``prompts`` are the speculation workload's, by category. ``save`` gets everything so far after
    each workload; ``earlier`` is an interrupted run's result, whose workloads are not run again.
    """
    result = earlier or _beginning(options)
    wanted = [name for name in names if name not in result]
    compared = [name for name in wanted if name in _COMPARED]
    if compared:
        with _worker("eyas", options) as eyas, _worker("transformers", options) as peer:
            for name in compared:
                say(name)
                workers = {"eyas": eyas, "transformers": peer}
                result[name] = _COMPARED[name](workers, options)
                save(result)
    if "spec" in wanted:
        result["spec"] = _speculation(options, prompts)
        save(result)
    if "memory" in wanted:
        say("memory")
        result["memory"] = {engine: _memory(engine, options) for engine in PEERS}
        save(result)
    return result


def _beginning(options: BenchOptions) -> dict[str, Any]:
    result = {"kind": "workloads"} | facts(options.threads)
    say("machine limits")
    with Worker(engine="none") as worker:
        result["limits"] = worker.do("limits", threads=options.threads)
    return result | {
        "model": Path(options.model).name,
        "format": main_format(options.model),
        "repeats": options.repeats,
        "size": model_size(options.model),
    }


def _worker(engine: str, options: BenchOptions, **more: Any) -> Worker:
    return Worker(engine=engine, model=options.model, threads=options.threads, **more)


def _compare(
    workers: dict[str, Worker], repeats: int, rate: Callable[[Worker], float]
) -> dict[str, Any]:
    """``rate`` of both, alternating; the first pair warms up and is not counted."""
    turns = take_turns(dict(workers), repeats, lambda worker: {"tok_per_s": rate(worker)})
    if turns.failed:
        raise RuntimeError(f"measuring failed: {turns.failed}")
    sides: dict[str, Any] = {name: summary(runs) for name, runs in turns.runs.items()}
    return sides | {"ratio": ratio(turns.runs["eyas"], turns.runs["transformers"], "tok_per_s")}


def _decode(workers: dict[str, Worker], options: BenchOptions) -> dict[str, Any]:
    size = {"prompt_tokens": 64, "output_tokens": 64}
    prompt = random_prompt(64)

    def rate(worker: Worker) -> float:
        return 1 / float(worker.do("decode", prompt=prompt, num_tokens=64))

    return size | _compare(workers, options.repeats, rate)


def _prefill(workers: dict[str, Worker], options: BenchOptions) -> list[dict[str, Any]]:
    results = []
    for length in (512, 1536):
        prompt = random_prompt(length)

        def rate(worker: Worker, prompt: list[int] = prompt) -> float:
            return len(prompt) / float(worker.do("prefill", prompt=prompt))

        results.append({"prompt_tokens": length} | _compare(workers, options.repeats, rate))
    return results


def _batch(workers: dict[str, Worker], options: BenchOptions) -> dict[str, Any]:
    size = {"requests": 8, "prompt_tokens": 32, "output_tokens": 48}
    prompts = [random_prompt(32, seed) for seed in range(8)]

    def rate(worker: Worker) -> float:
        return 8 * 48 / float(worker.do("batch", prompts=prompts, num_tokens=48))

    return size | _compare(workers, options.repeats, rate)


_COMPARED: dict[str, Callable[[dict[str, Worker], BenchOptions], Any]] = {
    "decode": _decode,
    "prefill": _prefill,
    "batch": _batch,
}


def _speculation(options: BenchOptions, prompts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Each category's prompts, plain and with n-gram drafts, one request at a time."""
    config = {"method": "ngram", "num_speculative_tokens": options.num_spec_tokens}
    rows = []
    with (
        _worker("eyas", options) as plain,
        _worker("eyas", options, speculative_config=config) as drafted,
    ):
        for category, texts in prompts.items():
            say(f"spec: {category}")
            chosen = texts[: options.prompts_per_category]
            rows.append({"category": category} | _answers(plain, drafted, chosen, options))
    drafts = sum(row["drafts"] for row in rows)
    accepted = sum(row["accepted"] for row in rows)
    return {
        "method": "ngram",
        "num_spec_tokens": options.num_spec_tokens,
        "prompts_per_category": options.prompts_per_category,
        "categories": rows,
        "acceptance_length": 1 + accepted / max(drafts, 1),
        # Every category weighs the same.
        "ratio": sum(row["ratio"] for row in rows) / len(rows),
    }


def _answers(
    plain: Worker, drafted: Worker, texts: Sequence[str], options: BenchOptions
) -> dict[str, Any]:
    pairs = []
    for _ in range(options.repeats):
        seconds = {"plain": 0.0, "drafted": 0.0}
        tokens = drafts = accepted = 0
        for text in texts:
            task = {"prompt": text, "num_tokens": options.answer_tokens}
            without, with_drafts = plain.do("answer", **task), drafted.do("answer", **task)
            if without["tokens"] != with_drafts["tokens"]:
                raise RuntimeError(f"speculation changed the answer to: {text[:60]}")
            seconds["plain"] += without["seconds"]
            seconds["drafted"] += with_drafts["seconds"]
            tokens += len(without["tokens"]) - 1  # the first token is the prefill's
            drafts += with_drafts["drafts"]
            accepted += with_drafts["accepted"]
        pairs.append((tokens / seconds["plain"], tokens / seconds["drafted"]))
    return {
        "drafts": drafts,
        "accepted": accepted,
        "acceptance_length": 1 + accepted / max(drafts, 1),
        "plain_tok_per_s": median(pair[0] for pair in pairs),
        "tok_per_s": median(pair[1] for pair in pairs),
        "ratio": median(pair[1] / pair[0] for pair in pairs),
    }


def _memory(engine: str, options: BenchOptions) -> int:
    """Peak bytes of a fresh process that loads the model and answers one request."""
    with _worker(engine, options) as worker:
        worker.do("batch", prompts=[random_prompt(256)], num_tokens=16)
        return int(worker.do("peak_memory"))
