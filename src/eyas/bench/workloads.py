"""The workloads: what is run, in which order, and how repeats become numbers.

Every comparison alternates: repeat i of one side runs right beside repeat i of the other, in the
same run on the same machine, and the ratio is the median of the pairs' ratios.
"""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from eyas.bench.machine import facts
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
    names: Sequence[str], options: BenchOptions, prompts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The named workloads' results, with everything needed to judge them, as plain values.

    ``prompts`` are the speculation workload's, by category.
    """
    result = facts(options.threads)
    result["model"] = options.model
    result["repeats"] = options.repeats
    _say("machine limits")
    with Worker(engine="none") as worker:
        result["limits"] = worker.do("limits", threads=options.threads)
    compared = [name for name in names if name in _COMPARED]
    if compared:
        with _worker("eyas", options) as eyas, _worker("transformers", options) as peer:
            result["parameters"] = peer.do("num_parameters")
            for name in compared:
                _say(name)
                result[name] = _COMPARED[name](eyas, peer, options)
    if "spec" in names:
        result["spec"] = _speculation(options, prompts)
    if "memory" in names:
        _say("memory")
        result["memory"] = {engine: _memory(engine, options) for engine in PEERS}
    return result


def _worker(engine: str, options: BenchOptions, **more: Any) -> Worker:
    return Worker(engine=engine, model=options.model, threads=options.threads, **more)


def _prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that every vocabulary has, without repeats that a cache or a draft could use."""
    return random.Random(seed).sample(range(100, 30_000), num_tokens)


def _alternate(
    eyas: Worker, peer: Worker, repeats: int, rate: Callable[[Worker], float]
) -> dict[str, Any]:
    """``rate`` of both, alternating; the first pair warms up and is not counted."""
    pairs = [(rate(eyas), rate(peer)) for _ in range(repeats + 1)][1:]
    ours, theirs = zip(*pairs, strict=True)
    return {
        "eyas": {"tok_per_s": median(ours), "runs": list(ours)},
        "transformers": {"tok_per_s": median(theirs), "runs": list(theirs)},
        "ratio": median(a / b for a, b in pairs),
    }


def _decode(eyas: Worker, peer: Worker, options: BenchOptions) -> dict[str, Any]:
    size = {"prompt_tokens": 64, "output_tokens": 64}
    prompt = _prompt(64)

    def rate(worker: Worker) -> float:
        return 1 / float(worker.do("decode", prompt=prompt, num_tokens=64))

    return size | _alternate(eyas, peer, options.repeats, rate)


def _prefill(eyas: Worker, peer: Worker, options: BenchOptions) -> list[dict[str, Any]]:
    results = []
    for length in (512, 1536):
        prompt = _prompt(length)

        def rate(worker: Worker, prompt: list[int] = prompt) -> float:
            return len(prompt) / float(worker.do("prefill", prompt=prompt))

        results.append({"prompt_tokens": length} | _alternate(eyas, peer, options.repeats, rate))
    return results


def _batch(eyas: Worker, peer: Worker, options: BenchOptions) -> dict[str, Any]:
    size = {"requests": 8, "prompt_tokens": 32, "output_tokens": 48}
    prompts = [_prompt(32, seed) for seed in range(8)]

    def rate(worker: Worker) -> float:
        return 8 * 48 / float(worker.do("batch", prompts=prompts, num_tokens=48))

    return size | _alternate(eyas, peer, options.repeats, rate)


_COMPARED: dict[str, Callable[[Worker, Worker, BenchOptions], Any]] = {
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
            _say(f"spec: {category}")
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
        worker.do("batch", prompts=[_prompt(256)], num_tokens=16)
        return int(worker.do("peak_memory"))


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
