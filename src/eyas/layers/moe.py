"""The mixture-of-experts feed-forward block."""

from dataclasses import dataclass

from eyas.layers.linear import Linear, load_linear
from eyas.layers.mlp import GatedMLP, GatedMLPSpec
from eyas.layers.source import Source
from eyas.ops.base import Handle, Ops, Routing, Value


class MoE:
    """The experts that a router chooses for each row, and one that every row goes through:
    [T, H] -> [T, H] (Shazeer et al. 2017; Rajbhandari et al. 2022 for the shared expert)."""

    def __init__(
        self, ops: Ops, router: Linear, experts: Handle, shared: GatedMLP, routing: Routing
    ) -> None:
        self._ops = ops
        self._router = router
        self._experts = experts
        self._shared = shared
        self._routing = routing

    def __call__(self, x_TH: Value) -> Value:
        routed_TH = self._ops.moe(self._experts, x_TH, self._router(x_TH), self._routing)
        return self._ops.add(self._shared(x_TH), routed_TH)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """``num_experts`` gated feed-forward blocks of ``intermediate_size``, and a shared one of the
    same size."""

    num_experts: int
    intermediate_size: int
    routing: Routing

    def build(self, source: Source, prefix: str, hidden_size: int) -> MoE:
        """From the checkpoint's ``{prefix}.feed_forward.*``: ``router``, ``shared_expert.*`` and
        ``experts.<number>.*``, whatever way the file keeps the experts."""
        block, size = f"{prefix}.feed_forward", self.intermediate_size
        take = source.weights.take
        router = load_linear(
            source, [(f"{block}.router", self.num_experts)], hidden_size, bias=False
        )
        gate_up, down = [], []
        for number in range(self.num_experts):
            expert = f"{block}.experts.{number}"
            gate_up.append(
                [
                    take(f"{expert}.gate_proj.weight", (size, hidden_size)),
                    take(f"{expert}.up_proj.weight", (size, hidden_size)),
                ]
            )
            down.append(take(f"{expert}.down_proj.weight", (hidden_size, size)))
        experts = source.ops.pack_experts(gate_up, down)
        shared = GatedMLPSpec(size, name="shared_expert").build(source, block, hidden_size)
        return MoE(source.ops, router, experts, shared, self.routing)
