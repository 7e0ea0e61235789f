"""Matrix products of one constant shape, and the probes that show they are row-exact.

A BLAS may pick another kernel, and another order of additions, for another shape: a product of one
row is not the first row of a product of sixteen. So every product here has one shape per weight.
That a row's place, its neighbours and the number of threads don't matter then is not promised by
any BLAS; it is probed once for each shape, on the machine that runs.
"""

from collections.abc import Callable

import torch

ROWS = 16  # rows of activations per product; fewer are padded with zeros


def multiply(weight_NK: torch.Tensor, block_KR: torch.Tensor, out_NR: torch.Tensor) -> None:
    """out = weight @ block, where ``block_KR`` is the transposed view of R = ROWS contiguous rows.

    Faster than rows @ weight.T for so few rows.
    """
    torch.mm(weight_NK, block_KR, out=out_NR)


def check_multiply(weight_NK: torch.Tensor) -> None:
    """RuntimeError unless ``multiply`` by this float32 weight is row-exact on this machine."""
    num_outputs, columns = weight_NK.shape
    generator = torch.Generator().manual_seed(columns)
    block_RK = torch.randn(ROWS, columns, generator=generator)

    def product(rows_RK: torch.Tensor) -> torch.Tensor:
        out_NR = torch.empty(num_outputs, ROWS)
        multiply(weight_NK, rows_RK.t(), out_NR)
        return out_NR.t()

    expected = product(block_RK)
    order = torch.randperm(ROWS, generator=generator)
    alone = torch.zeros(ROWS, columns)
    alone[0] = block_RK[ROWS // 2]
    poisoned = torch.full((ROWS, columns), float("nan"))
    poisoned[ROWS - 1] = block_RK[ROWS // 2]

    def holds() -> bool:
        return (
            torch.equal(product(block_RK), expected)
            and torch.equal(product(block_RK[order]), expected[order])
            and torch.equal(product(alone)[0], expected[ROWS // 2])
            and torch.equal(product(poisoned)[ROWS - 1], expected[ROWS // 2])
        )

    _require(holds, f"products with a [{num_outputs}, {columns}] weight")


def check_attention_products(num_keys: int, num_kv_heads: int, head_dim: int) -> None:
    """RuntimeError unless the attention's batched products are row- and batch-exact here."""
    generator = torch.Generator().manual_seed(head_dim)
    items = 5
    q = torch.randn(items, ROWS, head_dim, generator=generator)
    kv = torch.randn(items, num_keys, num_kv_heads, head_dim, generator=generator)
    k, v = kv[:, :, num_kv_heads - 1].transpose(1, 2), kv[:, :, num_kv_heads - 1]

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = torch.empty(left.shape[0], ROWS, right.shape[2])
        torch.bmm(left, right, out=out)
        return out

    scores = product(q, k)
    values = product(scores, v)

    def holds() -> bool:
        shifted = product(q.roll(3, dims=1), k)
        same_key = product(q, k[2:3].expand_as(k))
        return (
            torch.equal(product(q, k), scores)
            and torch.equal(product(q[2:3], k[2:3]), scores[2:3])
            and torch.equal(product(scores[2:3], v[2:3]), values[2:3])
            and torch.equal(same_key[2], scores[2])
            and torch.equal(product(scores, v[2:3].expand_as(v))[2], values[2])
            and torch.equal(shifted, scores.roll(3, dims=1))
            and torch.equal(product(scores.roll(3, dims=1), v), values.roll(3, dims=1))
        )

    _require(holds, f"attention products with {num_kv_heads} heads of {head_dim}")


def _require(holds: Callable[[], bool], what: str) -> None:
    threads = torch.get_num_threads()
    try:
        for count in sorted({1, 2, threads}):
            torch.set_num_threads(count)
            if not holds():
                raise RuntimeError(
                    f"this machine's BLAS is not row-exact for {what} on {count} threads, so "
                    "outputs could depend on the batch: use the reference ops"
                )
    finally:
        torch.set_num_threads(threads)
