"""Mixtures of experts have the values of transformers' blocks, as close as float32 can be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bits import random
from implementations import ALL, Family, compiled
from in_memory import InMemoryTensor
from torch import nn
from transformers import Llama4TextConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from eyas.ops.base import Routing

EPS = torch.finfo(torch.float32).eps
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Bounded:
    """Exact values, float64, and how far float32 may be off."""

    exact: torch.Tensor
    error: torch.Tensor

    def linear(self, weight_NK: torch.Tensor) -> "Bounded":
        # K products and K additions, in any order (Higham 2002, section 3.1).
        wide = weight_NK.double()
        magnitude = (self.exact.abs() + self.error) @ wide.abs().T
        rounding = (weight_NK.shape[1] + 2) * EPS * magnitude + TINY
        return Bounded(self.exact @ wide.T, self.error @ wide.abs().T + rounding)

    def silu_mul(self) -> "Bounded":
        (gate, up), (gate_error, up_error) = self.exact.chunk(2, -1), self.error.chunk(2, -1)
        silu = gate * gate.sigmoid()
        silu_error = 1.1 * gate_error  # |silu'| < 1.1
        exact = silu * up
        error = silu_error * (up.abs() + up_error) + silu.abs() * up_error
        return Bounded(exact, error + 8 * EPS * (exact.abs() + error) + TINY)

    def times(self, factor: "Bounded") -> "Bounded":
        exact = self.exact * factor.exact
        error = self.error * (factor.exact.abs() + factor.error) + self.exact.abs() * factor.error
        return Bounded(exact, error + EPS * (exact.abs() + error) + TINY)


def gate_weight(scores: Bounded, chosen: torch.Tensor, routing: Routing) -> Bounded:
    """[E]: of the scores that are chosen, and 0 elsewhere."""
    # transformers, too, is off: it rounds the scores to float32.
    off = scores.error.max() + EPS * scores.exact.abs().max()
    if routing.kind == "sigmoid_input":
        weight = scores.exact.sigmoid() * chosen
        # |d log sigmoid| < 1. transformers and we round once each, and its exp has 2 roundings.
        return Bounded(weight, weight * (off.expm1() + 5 * EPS))
    over = chosen if routing.normalise else torch.ones_like(chosen)
    powers = (scores.exact - scores.exact.max()).exp()
    weight = powers * chosen / (powers * over).sum()
    # A softmax moves by a factor e^(2 off) at most; transformers' is in float32: E + 8 roundings.
    return Bounded(weight, weight * ((2 * off).expm1() + (len(chosen) + 8) * EPS))


def randomise(block: nn.Module) -> None:
    """Values that float32 holds, calculated with in float64."""
    for seed, parameter in enumerate(block.parameters()):
        values = random(*parameter.shape, seed=seed) / parameter.shape[-1] ** 0.5
        parameter.data = values.double()


def llama4(num_experts: int, top_k: int) -> tuple[Any, torch.Tensor, Any, Any, Routing]:
    config = Llama4TextConfig(
        hidden_size=64,
        intermediate_size=48,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
    )
    block = Llama4TextMoe(config)
    randomise(block)
    block.shared_expert.down_proj.weight.data.zero_()
    gate_up = block.experts.gate_up_proj.data.transpose(1, 2)
    down = block.experts.down_proj.data.transpose(1, 2)
    run = lambda x: block(x)[0]  # noqa: E731
    return run, block.router.weight.data, gate_up, down, Routing(top_k, "sigmoid_input")


def mixtral(num_experts: int, top_k: int) -> tuple[Any, torch.Tensor, Any, Any, Routing]:
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=48,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        experts_implementation="eager",
    )
    block = MixtralSparseMoeBlock(config)
    randomise(block)
    run = lambda x: block(x[None])[0]  # noqa: E731
    experts = block.experts
    routing = Routing(top_k, "softmax_output")
    return run, block.gate.weight.data, experts.gate_up_proj.data, experts.down_proj.data, routing


def qwen3(num_experts: int, top_k: int, norm: bool) -> tuple[Any, torch.Tensor, Any, Any, Routing]:
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=48,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm,
        experts_implementation="eager",
    )
    block = Qwen3MoeSparseMoeBlock(config)
    randomise(block)
    run = lambda x: block(x[None])[0]  # noqa: E731
    experts = block.experts
    routing = Routing(top_k, "softmax_output", norm)
    return run, block.gate.weight.data, experts.gate_up_proj.data, experts.down_proj.data, routing


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
@pytest.mark.parametrize(
    "make",
    [
        lambda: llama4(4, 1),
        lambda: llama4(16, 3),
        lambda: mixtral(8, 2),
        lambda: mixtral(2, 2),
        lambda: qwen3(16, 4, True),
        lambda: qwen3(16, 4, False),
        lambda: qwen3(5, 1, False),
    ],
    ids=["llama4", "llama4-3", "mixtral", "mixtral-all", "qwen3", "qwen3-raw", "qwen3-1"],
)
def test_values_are_those_of_transformers(family: Family, make: Callable[[], Any]) -> None:
    oracle, router, gate_up, down, routing = make()
    ops = family.at(2)
    x = random(24, 64, seed=50)
    with torch.no_grad():
        expected = oracle(x.double())

    router_handle = ops.pack_linear([InMemoryTensor(router.float())], None)
    handle = ops.pack_experts(
        [[InMemoryTensor(weight.float())] for weight in gate_up],
        [InMemoryTensor(weight.float()) for weight in down],
    )
    run = compiled(ops, lambda x: ops.moe(handle, x, ops.linear(router_handle, x), routing))
    actual = run(x).double()

    checked = 0
    for row in range(len(x)):
        x_H = Bounded(x[row].double(), torch.zeros(64, dtype=torch.float64))
        scores = x_H.linear(router.float())
        ordered, order = scores.exact.sort(descending=True)
        if routing.top_k < len(ordered):
            gap = ordered[routing.top_k - 1] - ordered[routing.top_k]
            if gap < 4 * scores.error.max() + 4 * EPS:
                continue  # either choice is right
        checked += 1
        chosen = torch.zeros(len(ordered))
        chosen[order[: routing.top_k]] = 1
        weight = gate_weight(scores, chosen, routing)
        total, error = torch.zeros(2, 64, dtype=torch.float64)
        for expert in order[: routing.top_k].tolist():
            one = Bounded(weight.exact[expert], weight.error[expert])
            into = routing.kind == "sigmoid_input"
            inside = x_H.times(one) if into else x_H
            result = inside.linear(gate_up[expert].float()).silu_mul().linear(down[expert].float())
            result = result if into else result.times(one)
            total += result.exact
            error += result.error + routing.top_k * EPS * (result.exact.abs() + result.error)
        assert ((expected[row] - total).abs() <= error).all()
        assert ((actual[row] - expected[row]).abs() <= 2 * error).all()
    assert checked > 20
