"""Linear layers, and how ranks share them (Shoeybi et al. 2019, Megatron-LM)."""

from collections.abc import Sequence

import torch

from eyas.layers.source import Source
from eyas.loading.quant import block_size
from eyas.loading.shard import shard
from eyas.ops.base import Handle, Ops, Value
from eyas.parallel import Share, split_units
from eyas.tensors import StoredTensor

_UNIT = 32  # inputs: what int8 activations share a scale over


class Linear:
    """x @ weight.T + bias over a packed weight: [T, K] -> [T, num_outputs]."""

    def __init__(self, ops: Ops, handle: Handle, num_outputs: int) -> None:
        self._ops = ops
        self._handle = handle
        self.num_outputs = num_outputs

    def __call__(self, x_TK: Value) -> Value:
        return self._ops.linear(self._handle, x_TK)


def load_linear(
    source: Source,
    parts: Sequence[tuple[str, int]],
    num_inputs: int,
    bias: bool,
    shares: Sequence[Share] | None = None,
) -> Linear:
    """One linear layer from the checkpoint's ``parts``, (name, outputs) each, stacked along the
    outputs; ``bias`` says whether every part has one. ``shares``: this rank's outputs of each part
    (None: all)."""
    shares = shares or [Share(0, size) for _, size in parts]
    weights = [
        shard(source.weights.take(f"{name}.weight", (size, num_inputs)), rows=share)
        for (name, size), share in zip(parts, shares, strict=True)
    ]
    biases = None
    if bias:
        biases = torch.cat(
            [
                source.vector(f"{name}.bias", size)[share.start : share.stop]
                for (name, size), share in zip(parts, shares, strict=True)
            ]
        )
    handle = source.ops.pack_linear(weights, biases)
    return Linear(source.ops, handle, sum(share.size for share in shares))


class RowParallelLinear:
    """A linear layer whose inputs the ranks share: [T, this rank's K] -> [T, num_outputs].

    Each rank multiplies its inputs with their columns of the weight, and all ranks' products are
    added up. Where shares don't end at the weight's blocks, all ranks' inputs are gathered instead,
    and each rank computes a share of the outputs.
    """

    def __init__(
        self,
        ops: Ops,
        linear: Linear,
        gathered: tuple[Sequence[Share], Sequence[Share]] | None = None,
    ) -> None:
        """``gathered``: the ranks' inputs and outputs, if the inputs are gathered."""
        self._ops = ops
        self._linear = linear
        self._gathered = gathered

    @property
    def has_partial(self) -> bool:
        """Whether this rank's addend, ``partial``, is all that it computes."""
        return self._gathered is None

    def partial(self, x_TK: Value) -> Value:
        """What ``all_reduce`` makes the layer's output of."""
        assert self._gathered is None, "inputs are gathered"
        return self._linear(x_TK)

    def __call__(self, x_TK: Value) -> Value:
        if self._gathered is None:
            return self._ops.all_reduce(self._linear(x_TK))
        inputs, outputs = self._gathered
        return self._ops.all_gather(self._linear(self._ops.all_gather(x_TK, inputs)), outputs)


def load_row_parallel(
    source: Source, weight: StoredTensor, shares: Sequence[Share], bias: bool
) -> RowParallelLinear:
    """The layer of the checkpoint's ``weight`` [N, K], of whose inputs the ranks have ``shares``;
    ``bias``: it has one."""
    ops, parallel = source.ops, source.ops.parallel
    name, (num_outputs, _) = weight.name.removesuffix(".weight"), weight.shape
    bias_N = source.vector(f"{name}.bias", num_outputs) if bias else None
    if all(share.stop % block_size(weight.format) == 0 for share in shares):
        # The bias is added once.
        handle = ops.pack_linear(
            [shard(weight, columns=shares[parallel.rank])], None if parallel.rank else bias_N
        )
        return RowParallelLinear(ops, Linear(ops, handle, num_outputs))
    outputs = split_units(num_outputs, parallel.size)
    assert outputs is not None, f"{name} has fewer outputs than there are ranks"
    own = outputs[parallel.rank]
    if bias_N is not None:
        bias_N = bias_N[own.start : own.stop]
    handle = ops.pack_linear([shard(weight, rows=own)], bias_N)
    return RowParallelLinear(ops, Linear(ops, handle, own.size), (shares, outputs))


def split_neurons(count: int, size: int, block: int) -> tuple[Share, ...] | None:
    """The ranks' neurons of a feed-forward block whose down projection is stored in blocks of
    ``block`` inputs: cut at multiples of 32 where there are enough of them, at blocks otherwise;
    None if there are fewer blocks than ranks."""
    return split_units(count, size, max(block, _UNIT)) or split_units(count, size, block)
