"""The gated feed-forward block."""

from dataclasses import dataclass

from eyas.layers.linear import (
    Linear,
    RowParallelLinear,
    load_linear,
    load_row_parallel,
    split_neurons,
)
from eyas.layers.source import Source
from eyas.loading.quant import block_size
from eyas.ops.base import Ops, Value


class GatedMLP:
    """down(silu(gate(x)) * up(x)): [T, H] -> [T, H] (Shazeer 2020, SwiGLU)."""

    def __init__(self, ops: Ops, gate_up: Linear, down: RowParallelLinear) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down

    @property
    def has_partial(self) -> bool:
        """See RowParallelLinear."""
        return self._down.has_partial

    def partial(self, x_TH: Value) -> Value:
        """This rank's addend of the result."""
        return self._down.partial(self._ops.silu_mul(self._gate_up(x_TH)))

    def __call__(self, x_TH: Value) -> Value:
        return self._down(self._ops.silu_mul(self._gate_up(x_TH)))


@dataclass(frozen=True, slots=True)
class GatedMLPSpec:
    """A gated feed-forward block; ``bias``: all three projections have one; ``name``: what the
    checkpoint calls it."""

    intermediate_size: int
    bias: bool = False
    name: str = "mlp"

    def build(self, source: Source, prefix: str, hidden_size: int) -> GatedMLP:
        """From the checkpoint's ``{prefix}.{name}.*``."""
        size, block = self.intermediate_size, f"{prefix}.{self.name}"
        gate_up = [(f"{block}.gate_proj", size), (f"{block}.up_proj", size)]
        down = source.weights.take(f"{block}.down_proj.weight", (hidden_size, size))
        ranks = source.ops.parallel
        shares = split_neurons(size, ranks.size, block_size(down.format))
        # With fewer blocks than ranks the down projection gathers its inputs.
        shares = shares or split_neurons(size, ranks.size, 1)
        if shares is None:
            raise ValueError(
                f"tensor_parallel_size {ranks.size} is more than the {size} neurons of {block}"
            )
        own = shares[ranks.rank]
        return GatedMLP(
            source.ops,
            load_linear(source, gate_up, hidden_size, self.bias, (own, own)),
            load_row_parallel(source, down, shares, self.bias),
        )
