"""Products by chosen algorithms: the choice with a pretended cuBLASLt, the products themselves on a GPU."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from minisgl_kernels import cublaslt, fp8_product, matmul, reference_fp8
from minisgl_kernels.cublaslt import CublasLtError, Product
from minisgl_kernels.fp8 import Fp8Matrix
from minisgl_kernels.quantize_fp8 import quantize
from tests.kernels.errors import relative_error

DTYPES = [torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("cache")


class PretendedLibrary:
    """In cuBLASLt's place: algorithm i takes `us[i]`, and its products are i + 1 times too large.

    Attributes:
        us: by algorithm; torch's own takes `torch_us`.
        max_rows: what the algorithms do at most.
        broken: algorithms that never run.
        timed: numbers of rows and weights of each product whose candidates were asked for.
    """

    def __init__(self, us: Sequence[float], torch_us: float = 10.0) -> None:
        self.us, self.torch_us = us, torch_us
        self.max_rows = 1 << 30
        self.broken: set[int] = set()
        self.timed: list[tuple[int, int]] = []
        self._running: int | None = None

    def product(
        self,
        num_rows: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        out_dtype: torch.dtype | None = None,
    ) -> PretendedProduct:
        assert torch.bfloat16 in (dtype, out_dtype)
        assert device.type == "cpu"
        return PretendedProduct(self, (num_rows, in_features), (out_features, in_features))

    def time_us(self, run: Callable[[matmul.Operand], object], weights: Sequence[matmul.Operand]) -> float:
        self._running = None
        run(weights[0])
        return self.torch_us if self._running is None else self.us[self._running]


def plain(matrix: matmul.Operand) -> torch.Tensor:
    return reference_fp8.dequantize(matrix) if isinstance(matrix, Fp8Matrix) else matrix


class PretendedProduct:
    def __init__(self, library: PretendedLibrary, x_shape: tuple[int, int], weight_shape: tuple[int, int]) -> None:
        self._library, self._x_shape, self._weight_shape = library, x_shape, weight_shape

    def candidates(self, workspace_bytes: int) -> list[bytes]:
        self._library.timed.append((self._x_shape[0], self._weight_shape[0]))
        assert workspace_bytes > 0
        return [bytes([number] * cublaslt.ALGORITHM_BYTES) for number in range(len(self._library.us))]

    def check(self, algorithm: bytes, workspace_bytes: int) -> None:
        assert workspace_bytes > 0
        if self._x_shape[0] > self._library.max_rows or algorithm[0] >= len(self._library.us):
            raise CublasLtError("not supported")

    def run(
        self,
        algorithm: bytes,
        x: matmul.Operand,
        weight: matmul.Operand,
        out: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        assert (x.shape, weight.shape) == (self._x_shape, self._weight_shape)
        assert workspace.nbytes > 0
        if algorithm[0] in self._library.broken:
            raise CublasLtError("broken")
        self._library._running = algorithm[0]
        out.copy_((algorithm[0] + 2) * plain(x) @ plain(weight).T)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PretendedLibrary]:
    def make(us: Sequence[float], torch_us: float = 10.0, version: int = 130100) -> PretendedLibrary:
        library = PretendedLibrary(us, torch_us)
        monkeypatch.setattr(cublaslt, "version", lambda: version)
        monkeypatch.setattr(cublaslt, "ALIGNMENT_BYTES", 1)
        monkeypatch.setattr(matmul, "Product", library.product)
        monkeypatch.setattr(fp8_product, "Product", library.product)
        monkeypatch.setattr(fp8_product, "candidates", lambda *_: [])
        monkeypatch.setattr(matmul, "time_us", library.time_us)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        return library

    return make


def weights_of(*shapes: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def tune(weights: Sequence[matmul.Operand], sizes: list[int]) -> matmul.Algorithms:
    return matmul.tune(weights, sizes, plain(weights[0]).device)


def factor(algorithms: matmul.Algorithms, weight: torch.Tensor, num_rows: int) -> int:
    """By how much a product is too large: which algorithm made it; 1 is torch."""
    x = torch.randn(num_rows, weight.shape[1]).to(weight.dtype)
    with algorithms.active():
        product = matmul.matmul(x, weight)
        assert torch.equal(matmul.matmul(x, weight, torch.empty_like(product)), product)
    return round(float(product.double().norm() / (x @ weight.T).double().norm()))


def test_the_fastest_algorithm_runs_where_it_is_active(pretend: Callable[..., PretendedLibrary]) -> None:
    pretend([9.0, 7.0, 8.0])
    weights = weights_of((16, 8), (16, 8), (24, 8))
    algorithms = tune(weights, [1, 4])
    assert len(algorithms) == 4
    assert [factor(algorithms, weight, size) for weight in weights for size in (1, 4)] == [3] * 6
    assert factor(algorithms, weights[0], 3) == 1  # no size
    x = torch.randn(4, 8).bfloat16()
    assert torch.equal(matmul.matmul(x, weights[0]), x @ weights[0].T)  # not active


@pytest.mark.parametrize(("us", "chosen"), [([9.81, 12.0], 0), ([12.0, 9.79], 1), ([], 0), ([10.0], 0), ([5.0], 1)])
def test_torchs_own_stays_unless_two_percent_are_gained(
    pretend: Callable[..., PretendedLibrary], us: list[float], chosen: int
) -> None:
    pretend(us)
    assert len(tune(weights_of((16, 8)), [4])) == chosen


def test_candidates_that_fail_are_left_out(pretend: Callable[..., PretendedLibrary]) -> None:
    library = pretend([1.0, 5.0, 8.0])
    library.broken = {0}
    (weight,) = weights_of((16, 8))
    assert factor(tune([weight], [4]), weight, 4) == 3


def test_each_size_runs_by_the_next_timed_one() -> None:
    timed = {1: 1, 2: 2, 4: 4, 8: 8, 16: 16, 24: 32, 32: 32, 40: 64, 64: 64, 72: 77, 77: 77}
    assert matmul.tuned_rows(list(timed)) == timed
    assert matmul.tuned_rows([1]) == {1: 1}
    assert matmul.tuned_rows([3]) == {3: 3}
    assert matmul.tuned_rows([4, 5]) == {4: 4, 5: 5}
    sizes = random.sample(range(1, 600), 50)
    timed = matmul.tuned_rows(sizes)
    assert all(size <= timed[size] <= max(sizes) for size in sizes)
    assert len(set(timed.values())) <= 24


def test_sizes_that_the_algorithm_does_not_do_keep_torchs_own(pretend: Callable[..., PretendedLibrary]) -> None:
    library = pretend([5.0])
    (weight,) = weights_of((16, 8))
    library.max_rows = 50
    algorithms = tune([weight], [40, 48, 56, 64])
    assert library.timed == [(64, 16)]
    assert [factor(algorithms, weight, size) for size in (40, 48, 56, 64)] == [2, 2, 1, 1]


def test_products_in_fp8_have_algorithms_of_their_own(pretend: Callable[..., PretendedLibrary]) -> None:
    """Beside those of weights of the same shape, each by those of its kind."""
    library = pretend([5.0])
    (weight,) = weights_of((16, 32))
    in_fp8 = quantize(weight, grouped=False)
    algorithms = tune([weight, in_fp8, quantize(weights_of((16, 24))[0], grouped=False)], [2, 4])  # 24: odd in FP8
    assert library.timed == [(2, 16), (4, 16)] * 2
    assert len(algorithms) == 4
    numbers = torch.randn(4, 32).bfloat16()
    x, exact = quantize(numbers, grouped=False), numbers @ weight.T
    assert 0.0 < relative_error(matmul.matmul(x, in_fp8), exact) < 0.1
    with algorithms.active():
        product = matmul.matmul(x, in_fp8)
        assert product.dtype == torch.bfloat16
        assert 0.0 < relative_error(product, 2 * exact) < 0.1
        assert torch.equal(matmul.matmul(x, in_fp8, torch.empty_like(product)), product)
        torch.testing.assert_close(matmul.matmul(numbers, weight), 2 * exact)


def test_later_starts_time_nothing_and_choose_the_same(pretend: Callable[..., PretendedLibrary], cache: Path) -> None:
    pretend([5.0, 4.0])
    weights = weights_of((16, 8), (24, 8))
    tune(weights, [1, 2])
    library = pretend([1.0, 4.0])
    algorithms = tune(weights, [1, 2])
    assert not library.timed
    assert factor(algorithms, weights[0], 2) == 3
    tune(weights, [1, 2, 4])
    assert library.timed == [(4, 16), (4, 24)]
    assert len(json.loads(cache.read_text(encoding="utf-8"))["algorithms"]) == 6


def test_another_version_of_the_library_chooses_anew(pretend: Callable[..., PretendedLibrary]) -> None:
    weights = weights_of((16, 8))
    pretend([5.0, 4.0])
    tune(weights, [1])
    library = pretend([1.0, 4.0], version=130200)
    assert factor(tune(weights, [1]), weights[0], 1) == 2
    assert library.timed == [(1, 16)]


def test_an_algorithm_that_the_library_does_not_know_is_not_run(
    pretend: Callable[..., PretendedLibrary], cache: Path
) -> None:
    weights = weights_of((16, 8))
    pretend([5.0])
    tune(weights, [1])
    text = cache.read_text(encoding="utf-8")
    known, unknown = ((bytes([number]) * cublaslt.ALGORITHM_BYTES).hex() for number in (0, 77))
    assert known in text
    cache.write_text(text.replace(known, unknown), encoding="utf-8")
    assert len(tune(weights, [1])) == 0


def test_odd_shapes_and_other_types_keep_torchs_own(pretend: Callable[..., PretendedLibrary]) -> None:
    library = pretend([1.0])
    weights = [*weights_of((15, 8), (16, 12)), *weights_of((16, 8), dtype=torch.float32), weights_of((8, 16))[0].T]
    algorithms = tune(weights, [1, 2])
    assert not library.timed
    assert len(algorithms) == 0


def test_tensors_that_do_not_lie_right_are_multiplied_by_torch(
    pretend: Callable[..., PretendedLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend([1.0])
    (weight,) = weights_of((16, 8))
    algorithms = tune([weight], [4])
    monkeypatch.setattr(cublaslt, "ALIGNMENT_BYTES", 16)
    wide, shifted = torch.randn(4, 9).bfloat16(), torch.randn(4 * 8 + 1).bfloat16()
    with algorithms.active():
        for x in (wide[:, :8], shifted[1:].view(4, 8)):
            torch.testing.assert_close(matmul.matmul(x, weight), x @ weight.T)
        out = torch.empty(4 * 16 + 1, dtype=torch.bfloat16)[1:].view(4, 16)
        x = torch.randn(4, 8).bfloat16()
        assert matmul.matmul(x, weight, out) is out
        torch.testing.assert_close(out, x @ weight.T)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without cuBLASLt")
def test_without_cublaslt_torch_multiplies(caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    (weight,) = weights_of((16, 8))
    with caplog.at_level(logging.WARNING):
        algorithms = tune([weight], [1, 4])
    assert "cuBLASLt can't be asked" in caplog.text
    assert factor(algorithms, weight, 4) == 1
    assert not cache.exists()


# ---------------------------------------------------------------------- on a GPU


def operands(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, weight = torch.randn(num_rows, in_features, device="cuda"), torch.randn(out_features, in_features, device="cuda")
    return x.to(dtype), (weight / in_features**0.5).to(dtype)


def random_shape() -> tuple[int, int, int]:
    return random.choice((1, 2, 8, 64, 200, 256)), 8 * random.randrange(1, 900), 8 * random.randrange(1, 1200)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_candidate_multiplies(dtype: torch.dtype) -> None:
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    for shape in [(1, 8, 8), (192, 17408, 5120), *(random_shape() for _ in range(10))]:
        x, weight = operands(*shape, dtype)
        exact, torchs = x.float() @ weight.float().T, x @ weight.T
        product = Product(*shape, dtype, x.device)
        candidates = product.candidates(workspace.nbytes)
        assert candidates
        for algorithm in candidates:
            product.check(algorithm, workspace.nbytes)
            out = torch.full_like(torchs, torch.nan)
            product.run(algorithm, x, weight, out, workspace)
            assert relative_error(out, exact) < max(1.5 * relative_error(torchs, exact), torch.finfo(dtype).eps)


@pytest.mark.gpu
def test_algorithms_that_do_not_fit_are_refused() -> None:
    shape = 64, 4096, 4096
    product = Product(*shape, torch.bfloat16, torch.device("cuda", 0))
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoCheck: "):
        product.check(b"\xff" * cublaslt.ALGORITHM_BYTES, 32 << 20)
    assert product.candidates(0)
    for algorithm in product.candidates(0):
        product.check(algorithm, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("always", [True, False])
def test_graphs_run_what_was_chosen(
    dtype: torch.dtype, always: bool, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    if always:
        monkeypatch.setattr(matmul, "_MIN_GAIN", 0.0)
    shapes, sizes = [(1024, 3072), (6144, 1024), (8191, 1024), (1024, 1028)], [1, 4, 8, 24, 40, 100]
    weights = [operands(1, *shape, dtype)[1] for shape in shapes for _ in range(3)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the weights are there
    with torch.cuda.stream(stream):
        algorithms = tune(weights, sizes)
        # Not every algorithm does fewer rows than it was timed for.
        assert len(algorithms) > 0.8 * 2 * len(sizes) or not always
        assert len(json.loads(cache.read_text(encoding="utf-8"))["algorithms"]) == 2 * 6
        for weight in weights:
            for size in sizes:
                x = torch.empty(size, weight.shape[1], dtype=dtype, device="cuda")
                out = torch.empty(size, len(weight), dtype=dtype, device="cuda")
                matmul.matmul(x, weight, out)
                graph = torch.cuda.CUDAGraph()
                with algorithms.active(), torch.cuda.graph(graph, stream=stream):
                    matmul.matmul(x, weight, out)
                    fresh = matmul.matmul(x, weight)
                for _ in range(2):
                    x.normal_()
                    graph.replay()
                    exact = x.float() @ weight.float().T
                    assert relative_error(out, exact) < 1.5 * relative_error(x @ weight.T, exact)
                    assert torch.equal(out, fresh)
                    before = out.clone()
                    graph.replay()
                    assert torch.equal(out, before)
        monkeypatch.setattr(matmul, "_fastest", None)
        assert len(tune(weights, sizes)) == len(algorithms)
