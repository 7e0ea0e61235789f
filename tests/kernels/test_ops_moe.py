"""Mixture of experts: every row as if alone (its values: test_ops_moe_values.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from bits import at_offset, random, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, FLOAT, INT8, REFERENCE, THREADS, Family, compiled
from in_memory import InMemoryTensor, RawTensor
from stored_weights import FLOATS, encode

from eyas.ops.base import Ops, Routing
from eyas.tensors import StoredTensor

NAN, INF = float("nan"), float("inf")
ROWS = 40
NUM_EXPERTS = 6
NAMES = {"ids": lambda value: getattr(value, "name", None)}
CASES = [
    (REFERENCE, "f32"),
    *((family, format) for family in FLOAT for format in ("f32", "bf16", "q8_0", "q4_1")),
    *((family, format) for family in INT8 for format in ("q8_0", "q4_1")),
]
ROUTINGS = [
    *(Routing(top_k, "sigmoid_input") for top_k in (1, 3)),
    *(Routing(top_k, "softmax_output") for top_k in (1, 2, 4)),
    Routing(2, "softmax_output", normalise=False),
]


@dataclass(frozen=True)
class Weights:
    """Per expert: gate and up, each [I, H], and down [H, I]."""

    gate_up: list[list[RawTensor]]
    down: list[RawTensor]


@cache
def weights(format: str, num_experts: int) -> Weights:
    hidden, size = (40, 24) if format in FLOATS else (96, 64)

    def weight(num_outputs: int, num_inputs: int, seed: int) -> RawTensor:
        return encode(format, random(num_outputs, num_inputs, seed=seed) / num_inputs**0.5)

    return Weights(
        [
            [weight(size, hidden, 3 * expert), weight(size, hidden, 3 * expert + 1)]
            for expert in range(num_experts)
        ],
        [weight(hidden, size, 3 * expert + 2) for expert in range(num_experts)],
    )


MoE = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def moe(family: Family, format: str, num_experts: int, routing: Routing, threads: int) -> MoE:
    """[T, H], [T, E] -> [T, H]."""
    ops = family.at(threads)
    handle = packed(family, format, num_experts, threads)
    return compiled(ops, lambda x, scores: ops.moe(handle, x, scores, routing))


@cache
def packed(family: Family, format: str, num_experts: int, threads: int) -> Any:
    stored = weights(format, num_experts)
    return family.at(threads).pack_experts(stored.gate_up, stored.down)


@cache
def alone(family: Family, format: str, num_experts: int) -> list[Callable[..., torch.Tensor]]:
    """Each expert as a feed-forward block of its own."""
    ops, stored = family.at(1), weights(format, num_experts)

    def block(expert: int) -> Callable[..., torch.Tensor]:
        gate_up = ops.pack_linear(stored.gate_up[expert], None)
        down = ops.pack_linear([stored.down[expert]], None)
        return compiled(ops, lambda x: ops.linear(down, ops.silu_mul(ops.linear(gate_up, x))))

    return [block(expert) for expert in range(num_experts)]


def row_alone(
    family: Family, format: str, x_H: torch.Tensor, scores_E: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Expert by expert, as the op's definition says."""
    order = scores_E.sort(descending=True, stable=True).indices
    experts = order[: routing.top_k].sort().values
    wide = scores_E.double()
    if routing.kind == "sigmoid_input":
        weight = wide.sigmoid().float()
    else:
        weight_over = experts if routing.normalise else torch.arange(len(wide))
        powers = (wide - wide.max()).exp()
        weight = (powers / powers[weight_over].sum()).float()
    blocks, total = alone(family, format, len(scores_E)), None
    for expert in experts.tolist():
        if routing.kind == "sigmoid_input":
            result = blocks[expert]((x_H * weight[expert])[None])[0]
        else:
            result = blocks[expert](x_H[None])[0] * weight[expert]
        total = result if total is None else total + result
    assert total is not None
    return total


def inputs(format: str, num_experts: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = weights(format, num_experts).down[0].shape[0]
    scores = random(rows, num_experts, seed=5)
    scores[::5] = scores[::5].round()  # ties
    return random(rows, hidden, seed=4), scores


@pytest.mark.parametrize(("family", "format"), CASES, **NAMES)
def test_every_number_of_rows_and_threads_gives_the_same_bits(family: Family, format: str) -> None:
    x, scores = inputs(format, NUM_EXPERTS)
    for routing in (Routing(1, "sigmoid_input"), Routing(3, "softmax_output")):
        expected = moe(family, format, NUM_EXPERTS, routing, 1)(x, scores)
        for count in range(1, ROWS + 1):
            rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(count))[:count]
            run = moe(family, format, NUM_EXPERTS, routing, THREADS[count % len(THREADS)])
            actual = run(at_offset(x[rows], count % 17), at_offset(scores[rows], count % 5))
            assert same_bits(actual, expected[rows]), (routing, count)


@pytest.mark.parametrize(("family", "format"), CASES, **NAMES)
@settings(max_examples=15, derandomize=True)
@given(
    num_experts=st.sampled_from([1, 2, 5, 16]),
    routing=st.sampled_from(ROUTINGS),
    rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=20),
    poison=st.sampled_from([NAN, INF, -INF, 3e38]),
    threads=st.sampled_from(THREADS),
)
def test_a_row_ignores_its_neighbours(
    family: Family,
    format: str,
    num_experts: int,
    routing: Routing,
    rows: list[int],
    poison: float,
    threads: int,
) -> None:
    routing = Routing(min(routing.top_k, num_experts), routing.kind, routing.normalise)
    x, scores = inputs(format, num_experts)
    expected = moe(family, format, num_experts, routing, 1)(x, scores)
    run = moe(family, format, num_experts, routing, threads)
    assert same_bits(run(x[rows], scores[rows]), expected[rows])
    poisoned_x, poisoned_scores = x.clone(), scores.clone()
    others = [row for row in range(ROWS) if row not in rows]
    poisoned_x[others[::2]] = poison
    poisoned_scores[others[::3]] = poison
    assert same_bits(run(poisoned_x, poisoned_scores)[rows], expected[rows])


@pytest.mark.parametrize(("family", "format"), CASES, **NAMES)
@pytest.mark.parametrize("num_experts", [1, 4, 16])
def test_a_row_is_what_its_experts_make_of_it_alone(
    family: Family, format: str, num_experts: int
) -> None:
    count = 12
    x, scores = inputs(format, num_experts, count)
    crowded = scores.clone()
    crowded[:, num_experts // 2] = 9.0  # every row's, and with top_k 1 the only one
    for routing in ROUTINGS:
        if routing.top_k > num_experts:
            continue
        for some in (scores, crowded):
            actual = moe(family, format, num_experts, routing, 2)(x, some)
            for row in range(count):
                expected = row_alone(family, format, x[row], some[row], routing)
                assert same_bits(actual[row], expected), (routing, row)


@pytest.mark.parametrize("family", [*ALL, *INT8], **NAMES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_ties_go_to_the_lowest_expert(family: Family, routing: Routing) -> None:
    format = "q8_0" if family in INT8 else "f32"
    x, _ = inputs(format, NUM_EXPERTS, 2)
    run = moe(family, format, NUM_EXPERTS, routing, 1)
    tied = torch.tensor([[0.0, 2.0, 0.0, 2.0, 2.0, 2.0], [1.0] * 6])
    for row in range(2):
        best = [1, 3, 4, 5] if row == 0 else [0, 1, 2, 3]
        lower = tied[row].clone()
        if not (routing.kind == "softmax_output" and not routing.normalise):
            lower[[e for e in range(NUM_EXPERTS) if e not in best[: routing.top_k]]] = -5.0
        assert same_bits(run(x, tied)[row], run(x, torch.stack([lower, lower]))[row])
        expected = row_alone(family, format, x[row], tied[row], routing)
        assert same_bits(run(x, tied)[row], expected)


@pytest.mark.parametrize("family", [*ALL, *INT8], **NAMES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_scores_that_are_not_finite(family: Family, routing: Routing) -> None:
    format = "q8_0" if family in INT8 else "f32"
    x, scores = inputs(format, NUM_EXPERTS, 8)
    run = moe(family, format, NUM_EXPERTS, routing, 2)
    expected = run(x, scores)
    scores[1] = NAN
    scores[2, 3] = NAN
    scores[4, :5] = -INF  # fewer than top_k are left
    scores[5] = -INF
    scores[6, 2] = INF
    actual = run(x, scores)
    assert actual[[1, 2]].isnan().all()
    for row in (0, 3, 7):
        assert same_bits(actual[row], expected[row])
    if routing.kind == "sigmoid_input":
        assert actual[[4, 5, 6]].isfinite().all()
        assert (actual[5] == 0).all()
    else:
        assert actual[4].isfinite().all()
        assert actual[[5, 6]].isnan().all()  # the softmax has no value


@pytest.mark.parametrize("family", [*FLOAT, *INT8], **NAMES)
def test_layers_of_experts_follow_each_other(family: Family) -> None:
    """With top_k 1 an assignment's row is as wide as a row: buffers must not be mistaken."""
    format, routing = "q8_0", Routing(1, "sigmoid_input")
    x, scores = inputs(format, NUM_EXPERTS)

    def layers(ops: Ops, handle: Any) -> Callable[..., torch.Tensor]:
        def function(x: Any, scores: Any) -> Any:
            for _ in range(3):
                x = ops.add(x, ops.moe(handle, x, scores, routing))
                x = ops.add(ops.rms_norm(x, torch.ones(96), 1e-5), x)
            return ops.add(x, x)

        return compiled(ops, function)

    expected = layers(family.at(1), packed(family, format, NUM_EXPERTS, 1))(x, scores)
    for threads in THREADS:
        run = layers(family.at(threads), packed(family, format, NUM_EXPERTS, threads))
        for count in (1, 2, 5, ROWS) * 5:
            assert same_bits(run(x[:count], scores[:count]), expected[:count])


@pytest.mark.parametrize("family", [*FLOAT, *INT8], **NAMES)
def test_formats_may_differ(family: Family) -> None:
    """Gate from up, and expert from expert: if one down weight is in floats, no expert's takes int8
    activations. (As floats, the q8_0 weights are the same values, added in the same order.)"""
    ops, routing = family.at(2), Routing(2, "softmax_output")
    q8_0, q4_1 = weights("q8_0", 4), weights("q4_1", 4)
    gate_up = [[a[0], b[1]] for a, b in zip(q8_0.gate_up, q4_1.gate_up, strict=True)]
    floats = [InMemoryTensor(tensor.read()) for tensor in q8_0.down]
    x, scores = inputs("q8_0", 4)

    def run(down: Sequence[StoredTensor]) -> torch.Tensor:
        handle = ops.pack_experts(gate_up, down)
        return compiled(ops, lambda x, scores: ops.moe(handle, x, scores, routing))(x, scores)

    assert same_bits(run([q8_0.down[0], *floats[1:]]), run(floats))
    assert [tensor.releases for tensor in floats] == [1, 2, 2, 2]


def test_experts_whose_sizes_do_not_fit_are_refused() -> None:
    ops, stored = FLOAT[0].at(1), weights("f32", 4)
    with pytest.raises(AssertionError, match="gate and up don't fit down"):
        ops.pack_experts([[gate] for gate, _ in stored.gate_up], stored.down)
    narrow = weights("q8_0", 4).down[3]
    with pytest.raises(AssertionError, match="experts of different sizes"):
        ops.pack_experts(stored.gate_up, [*stored.down[:3], narrow])
