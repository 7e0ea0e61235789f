"""The gated feed-forward block."""

from dataclasses import dataclass

from eyas.layers.linear import Linear, load_linear
from eyas.layers.source import Source
from eyas.ops.base import Ops, Value


class GatedMLP:
    """down(silu(gate(x)) * up(x)): [T, H] -> [T, H] (Shazeer 2020, SwiGLU)."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down

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
        down = [(f"{block}.down_proj", hidden_size)]
        return GatedMLP(
            source.ops,
            load_linear(source, gate_up, hidden_size, self.bias),
            load_linear(source, down, size, self.bias),
        )
