"""Linear layers in shards: what the ranks compute together is what one computes alone."""

import pytest
import torch
from bits import random, same_bits
from implementations import compiled
from in_memory import InMemoryTensor
from ranks import native_ranks, on_ranks
from stored_weights import block_inputs, random_weight

from eyas.layers.linear import load_linear, load_row_parallel
from eyas.layers.source import Source
from eyas.loading.shard import shard
from eyas.ops.base import Ops
from eyas.ops.native import NativeOps
from eyas.parallel import Share, split_units
from eyas.tensors import StoredTensor

EPS = torch.finfo(torch.float32).eps
NUM_OUTPUTS, NUM_INPUTS = 40, 1024


class Weights:
    """A weight and its bias, which may be taken again and again."""

    def __init__(self, weight: StoredTensor, bias: torch.Tensor) -> None:
        self._tensors = {"linear.weight": weight, "linear.bias": InMemoryTensor(bias)}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        assert self._tensors[name].shape == shape
        return self._tensors[name]

    def finish(self) -> None:
        pass


def stored(format: str) -> StoredTensor:
    weight = random_weight(format, NUM_OUTPUTS, NUM_INPUTS)
    weight.name = "linear.weight"
    return weight


@pytest.mark.parametrize("format", ["f32", "bf16", "q4_1", "q8_0", "q5_k", "q6_k"])
def test_a_shard_has_the_rows_and_columns(format: str) -> None:
    whole = stored(format)
    rows, columns = Share(3, 30), Share(256, 768)
    part = shard(whole, rows, columns)
    assert (part.shape, part.format, part.name) == ((27, 512), format, whole.name)
    assert same_bits(part.read(2, 9), whole.read(5, 12)[:, 256:768])
    # The stored bytes, decoded as a tensor of their own.
    raw = type(whole)(part.read_raw().copy(), format)
    assert same_bits(raw.read(), whole.read(3, 30)[:, 256:768])
    assert shard(whole, Share(0, NUM_OUTPUTS)) is whole


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("format", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("unit", [32, 256])
@pytest.mark.parametrize("size", [2, 3])
def test_row_parallel(format: str, unit: int, size: int, activations: str) -> None:
    weights = Weights(stored(format), random(NUM_OUTPUTS, seed=1))
    shares = split_units(NUM_INPUTS, size, unit)
    assert shares is not None
    x = random(5, NUM_INPUTS, seed=2)

    def run(ops: Ops, shares: tuple[Share, ...]) -> torch.Tensor:
        weight = weights.take("linear.weight", (NUM_OUTPUTS, NUM_INPUTS))
        layer = load_row_parallel(Source(weights, ops), weight, shares, True)
        own = shares[ops.parallel.rank]
        return compiled(ops, layer)(x[:, own.start : own.stop].contiguous())

    alone = run(NativeOps(None, activations, 1), (Share(0, NUM_INPUTS),))
    ranks = native_ranks(size, activation_dtype=activations)
    first, *others = on_ranks(size, lambda rank: run(ranks[rank], shares))
    assert all(same_bits(other, first) for other in others)
    if shares[0].stop % block_inputs(format):
        assert same_bits(first, alone)  # inputs are gathered: each sum is one rank's
    else:
        # The same terms, added up in another order (Higham 2002, section 3.1); an int8 activation
        # is at most twice what it stands for, or half a step, of which there are 127.
        size_of_terms = x.abs() + x.abs().amax(dim=1, keepdim=True) / 127
        whole = weights.take("linear.weight", (NUM_OUTPUTS, NUM_INPUTS)).read()
        bound = 2 * NUM_INPUTS * EPS * (2 * size_of_terms @ whole.abs().T + 1)
        assert ((first - alone).abs() <= bound).all()


@pytest.mark.parametrize("format", ["f32", "q4_1"])
def test_column_parallel_has_the_bits_of_the_whole(format: str) -> None:
    weights = Weights(stored(format), random(NUM_OUTPUTS, seed=1))
    x = random(3, NUM_INPUTS, seed=2)
    ops = NativeOps(num_threads=1)
    parts = [("linear", NUM_OUTPUTS)]

    def run(share: Share) -> torch.Tensor:
        layer = load_linear(Source(weights, ops), parts, NUM_INPUTS, True, (share,))
        assert layer.num_outputs == share.size
        return compiled(ops, layer)(x)

    whole = run(Share(0, NUM_OUTPUTS))
    assert same_bits(torch.cat([run(Share(0, 17)), run(Share(17, NUM_OUTPUTS))], dim=1), whole)
