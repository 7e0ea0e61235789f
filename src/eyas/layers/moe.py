"""The mixture-of-experts feed-forward block."""

from dataclasses import dataclass

from eyas.layers.linear import Linear, load_linear, split_neurons
from eyas.layers.mlp import GatedMLP, GatedMLPSpec
from eyas.layers.source import Source
from eyas.loading.quant import block_size
from eyas.loading.shard import shard
from eyas.ops.base import Handle, Ops, Routing, Value


class MoE:
    """The experts that a router chooses for each row, and one that every row goes through:
    [T, H] -> [T, H] (Shazeer et al. 2017; Rajbhandari et al. 2022 for the shared expert)."""

    def __init__(
        self,
        ops: Ops,
        router: Linear,
        experts: Handle,
        shared: GatedMLP,
        routing: Routing,
        has_partial: bool,
    ) -> None:
        """``has_partial``: this rank has a share of each expert's neurons."""
        self._ops = ops
        self._router = router
        self._experts = experts
        self._shared = shared
        self._routing = routing
        self._has_partial = has_partial

    def __call__(self, x_TH: Value) -> Value:
        routed_TH = self._ops.moe(self._experts, x_TH, self._router(x_TH), self._routing)
        if not self._has_partial:
            return self._ops.add(self._shared(x_TH), routed_TH)
        if self._shared.has_partial:  # one exchange for both
            return self._ops.all_reduce(self._ops.add(self._shared.partial(x_TH), routed_TH))
        return self._ops.add(self._shared(x_TH), self._ops.all_reduce(routed_TH))


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
        ranks = source.ops.parallel
        block_of_all = max(block_size(weight.format) for weight in down)
        shares = split_neurons(size, ranks.size, block_of_all)
        if shares is not None:  # else every rank has all neurons
            own = shares[ranks.rank]
            gate_up = [[shard(weight, rows=own) for weight in pair] for pair in gate_up]
            down = [shard(weight, columns=own) for weight in down]
        experts = source.ops.pack_experts(gate_up, down)
        shared = GatedMLPSpec(size, name="shared_expert").build(source, block, hidden_size)
        return MoE(source.ops, router, experts, shared, self.routing, shares is not None)
