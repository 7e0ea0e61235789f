"""The processors again, in plain Python over lists, scanning the whole history each time."""

import math
from collections.abc import Sequence

from eyas.sampling.rules import SamplingRules


def scores(
    logits: Sequence[float], rules: SamplingRules, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Masks, bias, then repetition, frequency and presence penalties; -inf is masked."""
    result = []
    for token, logit in enumerate(logits):
        value = logit
        if rules.allowed_token_ids is not None and token not in rules.allowed_token_ids:
            value = -math.inf
        for word in rules.bad_words:
            before = list(word[:-1])
            if word[-1] == token and list(output)[len(output) - len(before) :] == before:
                value = -math.inf
        if token in rules.stop_ids and len(output) < rules.min_tokens:
            value = -math.inf
        value += dict(rules.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            penalty = rules.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= rules.frequency_penalty * list(output).count(token)
        value -= rules.presence_penalty * (token in output)
        result.append(value)
    return result


def probabilities(processed: Sequence[float], rules: SamplingRules) -> list[float]:
    """Temperature, min-p, top-k, top-p; lower ids win ties."""
    best = max(processed)
    if rules.temperature == 0:
        chosen = processed.index(best)
        return [float(token == chosen) for token in range(len(processed))]
    weights = [math.exp((value - best) / rules.temperature) for value in processed]
    weights = [w if w >= rules.min_p * max(weights) else 0.0 for w in weights]
    order = sorted((t for t, w in enumerate(weights) if w > 0), key=lambda t: (-weights[t], t))
    if rules.top_k > 0:
        order = order[: rules.top_k]
    total = math.fsum(weights[t] for t in order)
    kept, reached = [], 0.0
    for token in order:
        if rules.top_p < 1 and reached >= rules.top_p:
            break
        kept.append(token)
        reached += weights[token] / total
    total = math.fsum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]


def chi_square(counts: Sequence[int], expected: Sequence[float]) -> float:
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))
