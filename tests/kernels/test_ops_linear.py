import pytest
import torch
from bits import same_bits, threads
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import InMemoryTensor

from eyas.ops import packing, row_exact
from eyas.ops.base import Ops
from eyas.ops.reference import ReferenceOps
from eyas.ops.torch_cpu import TorchOps

EPS = torch.finfo(torch.float32).eps
SHAPES = [(1, 8), (7, 48), (40, 24), (33, 100), (96, 33), (2050, 16)]  # the last: two tiles
LARGE = [(960, 576), (3072, 576), (576, 1536)]  # TorchOps only
ROWS = 70


def run_linear(ops: Ops, handle: object, x_TK: torch.Tensor, num_outputs: int) -> torch.Tensor:
    out_TN = torch.full((len(x_TK), num_outputs), float("nan"))
    ops.linear(handle, x_TK, out_TN)
    return out_TN


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def row_choices(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Some of the rows in some order, an offset of the buffer in floats, and a thread count."""
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS))
    return rows, draw(st.integers(0, 17)), draw(st.sampled_from([1, 1, 1, 2]))


def at_offset(x: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of ``x`` that starts ``offset`` floats into its memory."""
    return torch.cat([torch.zeros(offset), x.reshape(-1)])[offset:].view(x.shape)


CASES = [
    *((ReferenceOps(), shape) for shape in SHAPES),
    *((TorchOps(), shape) for shape in [*SHAPES, *LARGE]),
    *((TorchOps(torch.bfloat16), shape) for shape in [(33, 100), (2050, 16)]),
    *((TorchOps(torch.float16), shape) for shape in [(33, 100), (2050, 16)]),
]


@pytest.mark.parametrize(("ops", "shape"), CASES, ids=lambda value: getattr(value, "name", None))
@settings(max_examples=8)
@given(choice=row_choices())
def test_a_row_ignores_its_neighbours(
    ops: Ops, shape: tuple[int, int], choice: tuple[list[int], int, int]
) -> None:
    rows, offset, count = choice
    num_outputs, columns = shape
    handle = ops.pack_linear([InMemoryTensor(random(*shape))], random(num_outputs, seed=1))
    x_TK = random(ROWS, columns, seed=2)
    with threads(1):
        expected = run_linear(ops, handle, x_TK, num_outputs)
    with threads(count):
        actual = run_linear(ops, handle, at_offset(x_TK[rows], offset), num_outputs)
    assert same_bits(actual, expected[rows])


@pytest.mark.parametrize("ops", [ReferenceOps(), TorchOps()], ids=lambda ops: ops.name)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_ignores_neighbours_that_are_not_finite(ops: Ops, poison: float) -> None:
    handle = ops.pack_linear([InMemoryTensor(random(40, 24))], None)
    x_TK = random(20, 24, seed=2)
    expected = run_linear(ops, handle, x_TK, 40)
    poisoned = torch.full_like(x_TK, poison)
    poisoned[::3] = x_TK[::3]
    assert same_bits(run_linear(ops, handle, poisoned, 40)[::3], expected[::3])


@pytest.mark.parametrize(("ops", "shape"), CASES, ids=lambda value: getattr(value, "name", None))
def test_values(ops: Ops, shape: tuple[int, int]) -> None:
    num_outputs, columns = shape
    weight, bias, x_TK = random(*shape), random(num_outputs, seed=1), random(19, columns, seed=2)
    handle = ops.pack_linear([InMemoryTensor(weight)], bias)
    stored = weight.to(handle.weight_NK.dtype).double()
    exact = x_TK.double() @ stored.T + bias.double()
    # K products and K additions, in any order (Higham 2002, section 3.1), then the bias.
    bound = (columns + 2) * EPS * (x_TK.double().abs() @ stored.abs().T + bias.abs())
    assert ((run_linear(ops, handle, x_TK, num_outputs).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("ops", [ReferenceOps(), TorchOps()], ids=lambda ops: ops.name)
def test_stacked_weights_are_one_weight(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CHUNK_BYTES", 4 * 24 * 3)  # three rows at a time
    parts = [InMemoryTensor(random(size, 24, seed=size)) for size in (7, 3, 10)]
    handle = ops.pack_linear(parts, None)
    assert torch.equal(handle.weight_NK[:20], torch.cat([part.read() for part in parts]))
    assert [part.releases for part in parts] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_embedding_is_looked_up_and_is_a_head(dtype: torch.dtype) -> None:
    table = random(50, 24)
    for ops in (TorchOps(dtype), ReferenceOps()):
        handle = ops.pack_embedding(InMemoryTensor(table))
        out = torch.empty(3, 24)
        ops.embed(handle, torch.tensor([49, 0, 7]), out)
        stored = table.to(handle.weight_NK.dtype).float()
        assert torch.equal(out, stored[[49, 0, 7]])
        x = random(2, 24, seed=1)
        separate = ops.pack_linear([InMemoryTensor(table)], None)
        assert same_bits(run_linear(ops, handle, x, 50), run_linear(ops, separate, x, 50))


def test_a_weight_that_float16_cannot_hold_is_refused() -> None:
    weight = InMemoryTensor(torch.full((3, 4), 70000.0), "layers.0.big.weight")
    with pytest.raises(ValueError, match=r"layers\.0\.big\.weight .*bfloat16 or float32"):
        TorchOps(torch.float16).pack_linear([weight], None)


def test_an_unknown_weight_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8 is not supported"):
        TorchOps(torch.int8)


def test_a_blas_that_is_not_row_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose first column is one rounding off, as a gemv's would be."""

    def multiply(weight_NK: torch.Tensor, block_KR: torch.Tensor, out_NR: torch.Tensor) -> None:
        torch.mm(weight_NK, block_KR, out=out_NR)
        out_NR[:, 0] = torch.mv(weight_NK.double(), block_KR[:, 0].double()).float()

    monkeypatch.setattr(row_exact, "multiply", multiply)
    with pytest.raises(RuntimeError, match=r"\[48, 100\] weight .* use the reference ops"):
        TorchOps().pack_linear([InMemoryTensor(random(33, 100))], None)


def test_a_blas_that_depends_on_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(weight_NK: torch.Tensor, block_KR: torch.Tensor, out_NR: torch.Tensor) -> None:
        torch.mm(weight_NK, block_KR, out=out_NR)
        if torch.get_num_threads() == 2:
            out_NR *= 1 + 2 * EPS

    before = torch.get_num_threads()
    monkeypatch.setattr(row_exact, "multiply", multiply)
    with pytest.raises(RuntimeError, match="use the reference ops"):
        TorchOps().pack_linear([InMemoryTensor(random(33, 100))], None)
    assert torch.get_num_threads() == before
