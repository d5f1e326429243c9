"""Products of rows that don't depend on each other: the choice with a pretended cuBLASLt, their bits on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl_kernels import cublaslt, fixed_order, matmul
from minisgl_kernels.cublaslt import CublasLtError
from minisgl_kernels.fixed_order import CpuFixedOrder, GpuFixedOrder
from minisgl_kernels.matmul_tiles import matmul_tiles
from tests.kernels.errors import DTYPES, relative_error

pytestmark = pytest.mark.usefixtures("cache")


class PretendedLibrary:
    """In cuBLASLt's place. Algorithm i takes `us[i]`, for `max_rows[i]` rows at most, and adds `bits[i]` to products.

    Attributes:
        ran: (algorithm, rows) of each product.
    """

    def __init__(self, us: list[float], bits: list[float], max_rows: list[int]) -> None:
        self.us, self.bits, self.max_rows = us, bits, max_rows
        self.ran: list[tuple[int, int]] = []

    def product_of(self, weight: torch.Tensor, num_rows: int) -> PretendedProduct:
        return PretendedProduct(self, num_rows)

    def time_us(self, run: object, weights: object) -> float:
        return self.us[self.ran[-1][0]]


class PretendedProduct:
    def __init__(self, library: PretendedLibrary, num_rows: int) -> None:
        self._library, self._num_rows = library, num_rows

    def candidates(self, workspace_bytes: int, *, splits: bool) -> list[bytes]:
        assert not splits
        numbers = [i for i, most in enumerate(self._library.max_rows) if self._num_rows <= most]
        return [bytes([number]) * cublaslt.ALGORITHM_BYTES for number in numbers]

    def check(self, algorithm: bytes, workspace_bytes: int) -> None:
        if self._num_rows > self._library.max_rows[algorithm[0]]:
            raise CublasLtError("not supported")

    def run(
        self, algorithm: bytes, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        assert len(x) == len(out) == self._num_rows
        self.check(algorithm, 0)
        self._library.ran.append((algorithm[0], len(x)))
        out.copy_(torch.stack([weight.double() @ row.double() for row in x]) + self._library.bits[algorithm[0]])


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PretendedLibrary]:
    def make(us: list[float], bits: list[float], max_rows: list[int]) -> PretendedLibrary:
        library = PretendedLibrary(us, bits, max_rows)
        monkeypatch.setattr(matmul, "product_of", library.product_of)
        monkeypatch.setattr(matmul, "time_us", library.time_us)
        monkeypatch.setattr(cublaslt, "version", lambda: 130100)
        monkeypatch.setattr(cublaslt, "ALIGNMENT_BYTES", 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        monkeypatch.setattr(fixed_order, "SIZES", (1, 2, 8))
        monkeypatch.setattr(fixed_order, "_REFERENCE_ROWS", 8)
        return library

    return make


def operands(num_rows: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return torch.randn(num_rows, shape[1]).to(dtype), torch.randn(shape).to(dtype)


def test_the_fastest_of_those_that_give_the_same_bits(pretend: Callable[..., PretendedLibrary]) -> None:
    # The first is the reference; the second would be faster and gives other bits, the third doesn't do many rows.
    library = pretend([9.0, 1.0, 5.0], [0.0, 1.0, 0.0], [99, 99, 2])
    x, weight = operands(9, (16, 8))
    products = GpuFixedOrder([weight], weight.device)
    exact = (x.double() @ weight.double().T).bfloat16()
    for num_rows, ran in ((1, [(2, 1)]), (2, [(2, 2)]), (3, [(0, 3)]), (9, [(0, 8), (2, 1)])):
        library.ran.clear()
        assert torch.equal(products.matmul(x[:num_rows], weight, None), exact[:num_rows])
        out = torch.empty_like(exact)
        assert products.matmul(x[:num_rows], weight, out[:num_rows]).data_ptr() == out.data_ptr()
        assert library.ran == ran * 2


def test_numbers_of_rows_that_no_algorithm_does_are_filled_up(
    pretend: Callable[..., PretendedLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pretend([1.0], [0.0], [99])
    x, weight = operands(5, (16, 8))
    products = GpuFixedOrder([weight], weight.device)
    check = PretendedProduct.check

    def picky(self: PretendedProduct, algorithm: bytes, workspace_bytes: int) -> None:
        check(self, algorithm, workspace_bytes)
        if self._num_rows == 5:
            raise CublasLtError("not supported")

    monkeypatch.setattr(PretendedProduct, "check", picky)
    library.ran.clear()
    assert torch.equal(products.matmul(x, weight, None), (x.double() @ weight.double().T).bfloat16())
    assert library.ran == [(0, 8)]


def test_later_starts_try_nothing_and_choose_the_same(pretend: Callable[..., PretendedLibrary], cache: Path) -> None:
    _, weight = operands(1, (16, 8))
    pretend([9.0, 5.0], [0.0, 0.0], [99, 99])
    GpuFixedOrder([weight], weight.device)
    assert cache.exists()
    library = pretend([1.0, 5.0], [0.0, 0.0], [99, 99])
    products = GpuFixedOrder([weight, weight], weight.device)
    assert not library.ran
    products.matmul(torch.randn(2, 8).bfloat16(), weight, None)
    assert library.ran == [(1, 2)]


def test_odd_shapes_and_other_types_are_multiplied_in_tiles(pretend: Callable[..., PretendedLibrary]) -> None:
    library = pretend([1.0], [1.0], [99])
    for shape, dtype in (((15, 8), torch.bfloat16), ((16, 12), torch.bfloat16), ((16, 8), torch.float32)):
        x, weight = operands(3, shape, dtype)
        library.ran.clear()
        torch.testing.assert_close(GpuFixedOrder([weight], weight.device).matmul(x, weight, None), x @ weight.T)
        assert not library.ran


def test_pieces_of_one_size_on_a_cpu() -> None:
    products = CpuFixedOrder()
    for _ in range(20):
        columns = random.randint(1, 100)
        x, weight = operands(40, (columns, random.randint(1, 130)), torch.float32)
        whole = products.matmul(x, weight, None)
        torch.testing.assert_close(whole, x @ weight.T)
        for _ in range(5):
            begin, end = sorted(random.sample(range(41), 2))
            out = torch.empty(end - begin, columns)
            assert torch.equal(products.matmul(x[begin:end].clone(), weight, out), whole[begin:end])


def test_rows_that_fill_no_vector_on_a_cpu() -> None:
    x = torch.randn(37, 13)
    whole = fixed_order.by_row(torch.sigmoid, x)
    assert torch.equal(whole, torch.sigmoid(x))
    with matmul.activate(CpuFixedOrder()):
        whole = fixed_order.by_row(torch.sigmoid, x)
        assert all(torch.equal(fixed_order.by_row(torch.sigmoid, x[i : i + 1]), whole[i : i + 1]) for i in range(37))
    torch.testing.assert_close(whole, torch.sigmoid(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 40), (70, 65, 130)], ids=str)
def test_tiles(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, columns, depth = shape
    x = torch.randn(num_rows, depth + 3, device=device).to(dtype)[:, :depth]
    weight = torch.randn(columns, depth, device=device).to(dtype)
    out = torch.full((num_rows + 1, columns), torch.nan, dtype=dtype, device=device)
    matmul_tiles(x, weight, out[:num_rows])
    assert relative_error(out[:num_rows], x.float() @ weight.float().T) < {2: 1e-2, 4: 1e-5}[dtype.itemsize]
    assert out[num_rows].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_on_a_gpu(dtype: torch.dtype) -> None:
    """Wherever it stands, and however many there are."""
    shapes = [(4096, 1024), (1024, 3072), (37, 1024), (1152, 896), (8 * random.randrange(1, 900), 520)]
    with torch.cuda.stream(torch.cuda.Stream()):
        weights = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
        products = GpuFixedOrder(weights, weights[0].device)
        for weight in weights:
            x = torch.randn(2200, weight.shape[1], device="cuda").to(dtype)
            whole = products.matmul(x, weight, None)
            assert relative_error(whole, x.float() @ weight.float().T) < {2: 1e-2, 4: 1e-5}[dtype.itemsize]
            order = torch.randperm(len(x), device="cuda")
            assert torch.equal(products.matmul(x[order], weight, None), whole[order])
            for num_rows in [*range(1, 40), *random.sample(range(40, 2200), 30)]:
                start = random.randrange(len(x) - num_rows + 1)
                rows = slice(start, start + num_rows)
                assert torch.equal(products.matmul(x[rows], weight, None), whole[rows]), (num_rows, *weight.shape)
