"""Matrix products of decode steps, each by the fastest of cuBLASLt's algorithms for its shape.

torch runs what a heuristic ranks first. With few rows that is often not the fastest, so before CUDA graphs are captured
the heuristic's other suggestions are timed too. Eager steps keep torch's own, and so does what would gain too little.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import cycle, islice
from typing import Protocol, TypeAlias, TypeVar, overload

import torch
import torch.nn.functional as F

from minisgl_kernels import cpp, cublaslt
from minisgl_kernels.algorithm_file import AlgorithmFile
from minisgl_kernels.cublaslt import CublasLtError, Product
from minisgl_kernels.fp8 import Fp8Matrix
from minisgl_kernels.fp8_product import Fp8Product
from minisgl_kernels.quantize_fp8 import quantize

logger = logging.getLogger(__name__)

_WORKSPACE_BYTES = 32 << 20
_MIN_GAIN = 1.02
_ROTATED_BYTES = 256 << 20  # several times what an L2 cache holds
_MAX_CALLS = 32
_REPLAYS = 5


Operand: TypeAlias = torch.Tensor | Fp8Matrix
"""A matrix; one in FP8 has a scale per row."""
_Matrix = TypeVar("_Matrix", torch.Tensor, Operand)


def matmul(x: Operand, weight: Operand, out: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T, by what the active `Products` have for it, or by torch's own algorithm.

    Args:
        x: (num_rows, in_features).
        weight: (out_features, in_features), of the same type.
        out: where to put the product, of x's dtype.

    Returns:
        (num_rows, out_features); `out` if it is given.
    """
    algorithms = _active.get()
    product = None if algorithms is None else algorithms.matmul(x, weight, out)
    if product is not None:
        return product
    if out is None and isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor):
        return F.linear(x, weight)
    return _by_torch(x, weight, _room(x, weight) if out is None else out)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`matmul` plus a bias, (out_features,), with which torch's own product is made; `out` is for products without."""
    if bias is None:
        return matmul(x, weight, out)
    return matmul(x, weight).add_(bias) if keeps_order() else F.linear(x, weight, bias)


def keeps_order() -> bool:
    """Whether rows must not depend on each other's number and places, in this thread: see `fixed_order`."""
    products = _active.get()
    return products is not None and products.keeps_order


class Products(Protocol):
    """What can be active: some way to multiply.

    Attributes:
        keeps_order: all products go this way, and what else is computed should keep the order of its sums, too.
    """

    keeps_order: bool

    def matmul(self, x: Operand, weight: Operand, out: torch.Tensor | None) -> torch.Tensor | None:
        """As the function; None where torch shall do it."""


@contextmanager
def activate(products: Products) -> Iterator[None]:
    """`matmul` asks them first, in this thread."""
    token = _active.set(products)
    try:
        yield
    finally:
        _active.reset(token)


class Algorithms:
    """What products run by while it is active, on one stream.

    CUDA graphs that are captured meanwhile use its workspace, so it has to live as long as they do.
    """

    keeps_order = False

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._chosen: dict[tuple[object, ...], tuple[Product | Fp8Product, bytes]] = {}

    def __len__(self) -> int:
        return len(self._chosen)

    @contextmanager
    def active(self) -> Iterator[None]:
        """`matmul` uses them, in this thread."""
        with activate(self):
            yield

    def add(self, weight: Operand, num_rows: int, algorithm: bytes) -> None:
        """Run products of this shape by the algorithm, if it does so many rows."""
        product, (x, out) = product_of(weight, num_rows), _operands(weight, num_rows)
        try:
            product.check(algorithm, _WORKSPACE_BYTES)
            product.run(algorithm, x, weight, out, self.workspace)
        except CublasLtError as error:
            logger.info("torch's own algorithm for %d x %d x %d: %s", num_rows, *weight.shape, error)
        else:
            self._chosen[_key(x, weight)] = product, algorithm

    def matmul(self, x: Operand, weight: Operand, out: torch.Tensor | None) -> torch.Tensor | None:
        """The product; None where it is torch's."""
        chosen = self._chosen.get(_key(x, weight))
        if chosen is None:
            return None
        out = _room(x, weight) if out is None else out
        tensors = _values(x), _values(weight), out
        if not all(t.is_contiguous() and t.data_ptr() % cublaslt.ALIGNMENT_BYTES == 0 for t in tensors):
            return None
        product, algorithm = chosen
        product.run(algorithm, x, weight, out, self.workspace)
        return out


_active: ContextVar[Products | None] = ContextVar("algorithms", default=None)


def tune(weights: Iterable[Operand], sizes: Sequence[int], device: torch.device) -> Algorithms:
    """Choose algorithms for the products of decode steps.

    Some numbers of rows are timed, where the cache's file doesn't know them; a size runs by the algorithm of the next
    larger one. Called on the stream that the products shall run on, which isn't the default one.

    Args:
        weights: (out_features, in_features) each; those of one shape share a choice, and are timed in turns.
        sizes: the numbers of rows that steps have.
        device: the GPU, which is the current one.
    """
    started = time.perf_counter()
    algorithms = Algorithms(device)
    groups = by_shape(weights)
    if not groups:
        return algorithms
    try:
        num_timed = _tune(algorithms, groups, sizes)
    except (OSError, CublasLtError) as error:
        logger.warning("torch chooses the matrix products' algorithms, since cuBLASLt can't be asked: %s", error)
        return algorithms
    logger.info(
        "%d of %d matrix products run by another algorithm than torch's own; %d were timed, in %.1f s",
        len(algorithms),
        len(groups) * len(sizes),
        num_timed,
        time.perf_counter() - started,
    )
    return algorithms


def _tune(algorithms: Algorithms, groups: list[list[Operand]], sizes: Sequence[int]) -> int:
    """Returns how many products were timed."""
    file = AlgorithmFile(cpp.cache_dir() / "matmul.json", cublaslt.ALGORITHM_BYTES)
    known, new = file.read(), {}
    rows_of = tuned_rows(sizes)
    for weights in groups:
        for num_rows in sorted(set(rows_of.values())):
            key = describe(weights[0], num_rows)
            if key not in known:
                new[key] = _fastest(weights, num_rows, algorithms.workspace)
    if new:
        known = file.add(new)
    for weights in groups:
        for size in sizes:
            algorithm = known[describe(weights[0], rows_of[size])]
            if algorithm is not None:
                algorithms.add(weights[0], size, algorithm)
    return len(new)


def describe(weight: Operand, num_rows: int) -> str:
    """What an algorithm depends on: the machine and the product."""
    machine = f"cuBLASLt {cublaslt.version()}, {torch.cuda.get_device_name(_values(weight).device)}"
    dtype = str(weight.dtype).removeprefix("torch.") + (" of FP8" if isinstance(weight, Fp8Matrix) else "")
    return f"{machine}, {dtype}, {num_rows} x {weight.shape[0]} x {weight.shape[1]}"


def tuned_rows(sizes: Sequence[int]) -> dict[int, int]:
    """The number of rows that is timed for each size: the next of 1, 2, 4, 8, 16 and every 32, or the largest size."""
    steps = [1, 2, 4, 8, 16, *range(32, max(sizes), 32), max(sizes)]
    return {size: min(step for step in steps if step >= size) for size in sizes}


def by_shape(weights: Iterable[_Matrix]) -> list[list[_Matrix]]:
    """Those that cuBLASLt has fast algorithms for; it needs rows of 16 bytes for them."""
    groups: dict[object, list[_Matrix]] = defaultdict(list)
    for weight in weights:
        values = _values(weight)
        unit = 16 // values.itemsize
        if weight.dtype in cublaslt.DTYPES and values.is_contiguous() and not any(s % unit for s in weight.shape):
            groups[values.dtype, weight.dtype, weight.shape].append(weight)
    return list(groups.values())


def _fastest(weights: Sequence[Operand], num_rows: int, workspace: torch.Tensor) -> bytes | None:
    """The algorithm for x of so many rows and weights of one shape; None: torch's own."""
    product, (x, out) = product_of(weights[0], num_rows), _operands(weights[0], num_rows)

    def time_torch() -> float:
        return time_us(lambda weight: _by_torch(x, weight, out), weights)

    torch_us, candidates = time_torch(), {}
    for algorithm in product.candidates(_WORKSPACE_BYTES):

        def run(weight: Operand, algorithm: bytes = algorithm) -> None:
            product.run(algorithm, x, weight, out, workspace)

        try:
            candidates[algorithm] = time_us(run, weights)
        except CublasLtError as error:
            logger.info("an algorithm for %d x %d x %d: %s", num_rows, *weights[0].shape, error)
    return _pick(min(torch_us, time_torch()), candidates)  # twice, since GPUs are slower at first


def _pick(torch_us: float, candidates: Mapping[bytes, float]) -> bytes | None:
    """The fastest candidate, if it is worth it."""
    best = min(candidates, key=candidates.__getitem__, default=None)
    return best if best is not None and candidates[best] * _MIN_GAIN <= torch_us else None


def time_us(run: Callable[[_Matrix], object], weights: Sequence[_Matrix]) -> float:
    """GPU time of one call, from replays of a CUDA graph: the host launches more slowly than small products run.

    Weights take turns, so that they come from memory as in a step, and not from the L2 cache.
    """
    run(weights[0])  # outside first: libraries allocate and load kernels
    num_calls = max(1, min(_MAX_CALLS, _ROTATED_BYTES // _values(weights[0]).nbytes))
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for weight in islice(cycle(weights), num_calls):
            run(weight)
    finally:
        graph.capture_end()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    for _ in range(1 + _REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3 / num_calls


@overload
def product_of(weight: torch.Tensor, num_rows: int) -> Product: ...
@overload
def product_of(weight: Operand, num_rows: int) -> Product | Fp8Product: ...
def product_of(weight: Operand, num_rows: int) -> Product | Fp8Product:
    """x @ weight.T for x of so many rows."""
    if isinstance(weight, Fp8Matrix):
        return Fp8Product(num_rows, weight)
    return Product(num_rows, weight.shape[0], weight.shape[1], weight.dtype, weight.device)


def _operands(weight: Operand, num_rows: int) -> tuple[Operand, torch.Tensor]:
    """A random x, and memory for the product."""
    device = _values(weight).device
    generator = torch.Generator(device).manual_seed(0)  # of its own: nobody else's numbers change
    numbers = torch.randn((num_rows, weight.shape[1]), generator=generator, dtype=weight.dtype, device=device)
    x = quantize(numbers, grouped=False) if isinstance(weight, Fp8Matrix) else numbers
    return x, _room(x, weight)


def _by_torch(x: Operand, weight: Operand, out: torch.Tensor) -> torch.Tensor:
    if isinstance(x, torch.Tensor) or isinstance(weight, torch.Tensor):
        return torch.mm(_values(x), _values(weight).t(), out=out)
    scales = x.scales, weight.scales.t()
    # Fewer bits in sums than float32's: what that loses is less than a tenth of what FP8 loses, and it's faster.
    return torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)


def _room(x: Operand, weight: Operand) -> torch.Tensor:
    """Memory for the product."""
    return torch.empty((len(x), len(weight)), dtype=x.dtype, device=_values(x).device)


def _values(matrix: Operand) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else matrix.values


def _key(x: Operand, weight: Operand) -> tuple[object, ...]:
    return _values(x).dtype, x.dtype, x.shape, weight.dtype, weight.shape
