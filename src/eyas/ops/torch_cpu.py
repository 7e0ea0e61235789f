"""TorchOps: every kernel on torch's and numpy's CPU libraries, row-exact and fast enough to use."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from eyas.ops import exact_math
from eyas.ops.attention_plan import KEY_TILE, build_plan
from eyas.ops.base import AttentionShape, AttentionSpan, KVLayer
from eyas.ops.packing import WEIGHT_DTYPES, pack_rows
from eyas.ops.row_exact import ROWS, check_attention_products, check_multiply, multiply
from eyas.ops.tiled_attention import TiledAttention
from eyas.tensors import StoredTensor

_WEIGHT_TILE = 2048  # at most so many rows of a weight per product: more is slower where measured
_WEIGHT_ROWS = 16  # in multiples of so many: with fewer rows than 12, MKL's bits vary with threads


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A [N, K] weight in its stored type, with rows of zeros up to a multiple of _WEIGHT_ROWS; the
    same in tiles; and an optional bias [N]."""

    num_outputs: int
    weight_NK: torch.Tensor
    tiles: tuple[torch.Tensor, ...]
    bias_N: torch.Tensor | None


class _Scratch:
    """A float32 buffer as a torch tensor and as a numpy array over the same memory."""

    def __init__(self, rows: int, columns: int) -> None:
        self.tensor = torch.zeros(rows, columns)
        self.transposed = self.tensor.t()
        self.array = exact_math.array(self.tensor)


class TorchOps:
    """The Ops protocol on torch CPU.

    ``weight_dtype`` is the type that weights are rounded to and kept in: bfloat16 and float16 halve
    the memory and are widened to float32 tile by tile when used; activations are always float32.

    Raises ValueError for another type, and RuntimeError (from the packing methods and
    ``plan_attention``) where this machine's BLAS is not row-exact.
    """

    name = "torch_cpu"

    def __init__(self, weight_dtype: torch.dtype = torch.float32) -> None:
        if weight_dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"weight_dtype {weight_dtype} is not supported: use one of "
                + ", ".join(str(dtype) for dtype in WEIGHT_DTYPES)
            )
        self._weight_dtype = weight_dtype
        self._checked: set[tuple[object, ...]] = set()
        self._blocks: dict[int, _Scratch] = {}  # ROWS padded rows of K activations, by K
        self._products: dict[int, _Scratch] = {}  # a tile's [N, ROWS] outputs, by N
        self._wide_weight = torch.empty(0)

    def pack_linear(
        self, weights: Sequence[StoredTensor], bias: torch.Tensor | None
    ) -> PackedWeight:
        weight_NK = pack_rows(weights, self._weight_dtype, _WEIGHT_ROWS)
        num_outputs, columns = sum(weight.shape[0] for weight in weights), weight_NK.shape[1]
        assert bias is None or (bias.shape == (num_outputs,) and bias.dtype == torch.float32)
        tiles = _even_tiles(weight_NK)
        self._blocks.setdefault(columns, _Scratch(ROWS, columns))
        for tile in tiles:
            if tile.shape not in self._checked:
                check_multiply(tile.float())
                self._checked.add(tile.shape)
                self._products.setdefault(tile.shape[0], _Scratch(tile.shape[0], ROWS))
        return PackedWeight(num_outputs, weight_NK, tiles, bias)

    def pack_embedding(self, weight: StoredTensor) -> PackedWeight:
        return self.pack_linear([weight], None)

    def linear(self, handle: PackedWeight, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        x, out = exact_math.array(x_TK), exact_math.array(out_TN)
        num_rows, columns = x.shape
        block = self._blocks[columns]
        start = 0
        for stored_tile_NK in handle.tiles:
            tile_NK = self._widen(stored_tile_NK)
            product = self._products[len(tile_NK)]
            stop = min(start + len(tile_NK), handle.num_outputs)
            product_RN = product.array.T[:, : stop - start]
            for row in range(0, num_rows, ROWS):
                count = min(ROWS, num_rows - row)
                # Always copied: the operands then have one shape, layout and alignment.
                block.array[:count] = x[row : row + count]
                block.array[count:] = 0.0
                multiply(tile_NK, block.transposed, product.tensor)
                out[row : row + count, start:stop] = product_RN[:count]
            start = stop
        if handle.bias_N is not None:
            out += exact_math.array(handle.bias_N)

    def embed(self, handle: PackedWeight, ids_T: torch.Tensor, out_TH: torch.Tensor) -> None:
        out_TH.copy_(handle.weight_NK[: handle.num_outputs].index_select(0, ids_T))

    def rms_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, out_TH: torch.Tensor
    ) -> None:
        array = exact_math.array
        exact_math.rms_norm(array(x_TH), array(weight_H), eps, array(out_TH))

    def rope(self, x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
        array = exact_math.array
        exact_math.rope(array(x_THD), array(cos_TD), array(sin_TD))

    def silu_mul(self, gate_up_TI: torch.Tensor, out_TI: torch.Tensor) -> None:
        exact_math.silu_mul(exact_math.array(gate_up_TI), exact_math.array(out_TI))

    def plan_attention(
        self, shape: AttentionShape, spans: Sequence[AttentionSpan], block_size: int
    ) -> TiledAttention:
        heads = (KEY_TILE, shape.num_kv_heads, shape.head_dim)
        if ("attention", *heads) not in self._checked:
            check_attention_products(*heads)
            self._checked.add(("attention", *heads))
        return TiledAttention(build_plan(shape, tuple(spans), block_size))

    def write_kv(
        self, plan: TiledAttention, k_TGD: torch.Tensor, v_TGD: torch.Tensor, kv: KVLayer
    ) -> None:
        kv.keys.index_copy_(0, plan.slots_T, k_TGD.to(kv.keys.dtype))
        kv.values.index_copy_(0, plan.slots_T, v_TGD.to(kv.values.dtype))

    def attention(
        self,
        plan: TiledAttention,
        q_TQD: torch.Tensor,
        kv: KVLayer,
        scale: float,
        out_TQD: torch.Tensor,
    ) -> None:
        plan.run(q_TQD, kv, scale, out_TQD)

    def _widen(self, tile_NK: torch.Tensor) -> torch.Tensor:
        """The tile in float32: itself, or a copy that is valid until the next call."""
        if tile_NK.dtype == torch.float32:
            return tile_NK
        if self._wide_weight.numel() < tile_NK.numel():
            self._wide_weight = torch.empty(tile_NK.numel())
        wide_NK = self._wide_weight[: tile_NK.numel()].view(tile_NK.shape)
        return wide_NK.copy_(tile_NK)


def _even_tiles(weight_NK: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The weight in as few tiles as _WEIGHT_TILE allows, of nearly the same number of rows: a small
    last one would be slow, and of a shape that few have tried."""
    groups = len(weight_NK) // _WEIGHT_ROWS
    count = -(-len(weight_NK) // _WEIGHT_TILE)
    edges = [groups * i // count * _WEIGHT_ROWS for i in range(count + 1)]
    return tuple(weight_NK[start:stop] for start, stop in pairwise(edges))
