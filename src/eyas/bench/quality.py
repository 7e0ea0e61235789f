"""``eyas bench quality``: what int8 activations and a float16 KV cache do to the predictions.

The same weights predict the same text twice: as by default, and with float32 activations and KV.
The text is documentation that every Python brings along, in windows without a shared context.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from eyas.bench.direct import ModelEngine
from eyas.bench.machine import facts
from eyas.bench.rounds import say
from eyas.bench.worker import Worker

_ROWS = 64  # of logits at a time


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """``num_tokens`` of text in windows of ``window``, of which transformers gets the first
    ``transformers_windows``."""

    model: str
    threads: int
    num_tokens: int = 20_480
    window: int = 1024
    transformers_windows: int = 20


@dataclass(slots=True)
class Divergence:
    """Sums over predicted tokens, in nats: of -log p(token) with each side, and of the divergence
    KL(reference || other) of their distributions; ``agree`` counts equal arg-maxes."""

    reference: float = 0.0
    other: float = 0.0
    kl: float = 0.0
    agree: int = 0
    count: int = 0
    per_window: list[tuple[float, float]] = field(default_factory=list)

    def add(
        self,
        reference_TV: npt.NDArray[np.float32],
        other_TV: npt.NDArray[np.float32],
        targets_T: Sequence[int],
    ) -> None:
        """Count T predictions of both sides."""
        a, b = _log_softmax(reference_TV), _log_softmax(other_TV)
        rows, targets = np.arange(len(a)), np.asarray(targets_T)
        self.reference -= float(a[rows, targets].sum())
        self.other -= float(b[rows, targets].sum())
        self.kl += float((np.exp(a) * (a - b)).sum())
        self.agree += int((a.argmax(1) == b.argmax(1)).sum())
        self.count += len(a)


def run(
    options: QualityOptions, earlier: dict[str, Any] | None, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Perplexities, the mean divergence, and the perplexity that transformers gets. ``save`` gets
    everything so far; what ``earlier``, an interrupted run's result, has is not done again."""
    windows = text_windows(options)
    result = earlier or {"kind": "quality"} | facts(options.threads)
    result |= {"model": Path(options.model).name, "window": options.window, "windows": len(windows)}
    if "eyas" not in result:
        result["eyas"] = describe(_compare(windows, options))
        save(result)
    chosen = windows[: options.transformers_windows]
    if chosen and "transformers" not in result:
        result["transformers"] = _transformers(options, chosen, result["eyas"]["per_window"])
        save(result)
    return result


def _compare(windows: Sequence[Sequence[int]], options: QualityOptions) -> Divergence:
    reference = _engine(options, activation_dtype="float32", kv_cache_dtype="float32")
    default = _engine(options)
    total = Divergence()
    for window in tqdm(windows, desc="eyas, twice", unit="window"):
        before = total.reference, total.other
        first, second = reference.hidden(window, 0), default.hidden(window, 0)
        for start in range(0, len(window) - 1, _ROWS):
            stop = min(start + _ROWS, len(window) - 1)
            total.add(
                reference.logits(np.ascontiguousarray(first[start:stop])),
                default.logits(np.ascontiguousarray(second[start:stop])),
                window[start + 1 : stop + 1],
            )
        total.per_window.append((total.reference - before[0], total.other - before[1]))
    return total


def describe(total: Divergence) -> dict[str, Any]:
    """``perplexity`` by default, ``reference_perplexity`` in float32, ``change`` between them, and
    the mean divergence in nats; ``per_window``: the sums of both sides in nats."""
    reference, other = (math.exp(s / total.count) for s in (total.reference, total.other))
    return {
        "tokens": total.count,
        "reference_perplexity": reference,
        "perplexity": other,
        "change": other / reference - 1,
        "mean_kl": total.kl / total.count,
        "same_top_token": total.agree / total.count,
        "per_window": total.per_window,
    }


def text_windows(options: QualityOptions) -> list[list[int]]:
    """Token ids of the text, in windows. ValueError if there is less text than asked for."""
    from pydoc_data.topics import topics

    from eyas.loading.checkpoint import load_tokenizer

    text = "\n\n".join(str(topics[name]) for name in sorted(topics))
    ids = load_tokenizer(options.model).encode(text, add_special_tokens=False)
    count = options.num_tokens // options.window
    if count < 1 or len(ids) < count * options.window:
        raise ValueError(
            f"{options.num_tokens} tokens in windows of {options.window} are asked for: the text"
            f" has {len(ids)}, and one window is needed"
        )
    return [ids[i * options.window : (i + 1) * options.window] for i in range(count)]


def _engine(options: QualityOptions, **more: Any) -> ModelEngine:
    return ModelEngine(options.model, options.threads, options.window, **more)


def _transformers(
    options: QualityOptions,
    windows: Sequence[Sequence[int]],
    ours: Sequence[Sequence[float]],
) -> dict[str, Any]:
    say("loading transformers")
    with Worker(engine="transformers", model=options.model, threads=options.threads) as worker:
        theirs = [
            float(worker.do("negative_log_likelihood", tokens=list(window)))
            for window in tqdm(windows, desc="transformers", unit="window")
        ]
    count = sum(len(window) - 1 for window in windows)
    same = ours[: len(windows)]
    perplexity = math.exp(sum(theirs) / count)
    by_default = math.exp(sum(pair[1] for pair in same) / count)
    return {
        "tokens": count,
        "perplexity": perplexity,
        "eyas_reference_perplexity": math.exp(sum(pair[0] for pair in same) / count),
        "eyas_perplexity": by_default,
        "change": by_default / perplexity - 1,
    }


def _log_softmax(logits_TV: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    x = logits_TV.astype(np.float64)
    x -= x.max(1, keepdims=True)
    result: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(1, keepdims=True))
    return result
