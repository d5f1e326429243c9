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

import torch
import torch.nn.functional as F

from minisgl_kernels import cpp, cublaslt
from minisgl_kernels.algorithm_file import AlgorithmFile
from minisgl_kernels.cublaslt import CublasLtError, Product

logger = logging.getLogger(__name__)

_WORKSPACE_BYTES = 32 << 20
_MIN_GAIN = 1.02
_ROTATED_BYTES = 256 << 20  # several times what an L2 cache holds
_MAX_CALLS = 32
_REPLAYS = 5


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T, by the algorithm that the active `Algorithms` hold for it, or by torch's own.

    Args:
        x: (num_rows, in_features).
        weight: (out_features, in_features), of the same type.
        out: where to put the product.

    Returns:
        (num_rows, out_features); `out` if it is given.
    """
    algorithms = _active.get()
    product = None if algorithms is None else algorithms.matmul(x, weight, out)
    if product is not None:
        return product
    return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


class Algorithms:
    """What products run by while it is active, on one stream.

    CUDA graphs that are captured meanwhile use its workspace, so it has to live as long as they do.
    """

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._chosen: dict[tuple[object, ...], tuple[Product, bytes]] = {}

    def __len__(self) -> int:
        return len(self._chosen)

    @contextmanager
    def active(self) -> Iterator[None]:
        """`matmul` uses them, in this thread."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def add(self, weight: torch.Tensor, num_rows: int, algorithm: bytes) -> None:
        """Run products of this shape by the algorithm, if it does so many rows."""
        product, (x, out) = _product(weight, num_rows), _operands(weight, num_rows)
        try:
            product.check(algorithm, _WORKSPACE_BYTES)
            product.run(algorithm, x, weight, out, self.workspace)
        except CublasLtError as error:
            logger.info("torch's own algorithm for %d x %d x %d: %s", num_rows, *weight.shape, error)
        else:
            self._chosen[_key(x, weight)] = product, algorithm

    def matmul(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        """The product; None where it is torch's."""
        chosen = self._chosen.get(_key(x, weight))
        if chosen is None:
            return None
        out = x.new_empty((len(x), len(weight))) if out is None else out
        if not all(t.is_contiguous() and t.data_ptr() % cublaslt.ALIGNMENT_BYTES == 0 for t in (x, weight, out)):
            return None
        product, algorithm = chosen
        product.run(algorithm, x, weight, out, self.workspace)
        return out


_active: ContextVar[Algorithms | None] = ContextVar("algorithms", default=None)


def tune(weights: Iterable[torch.Tensor], sizes: Sequence[int], device: torch.device) -> Algorithms:
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
    groups = _by_shape(weights)
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


def _tune(algorithms: Algorithms, groups: list[list[torch.Tensor]], sizes: Sequence[int]) -> int:
    """Returns how many products were timed."""
    file = AlgorithmFile(cpp.cache_dir() / "matmul.json", cublaslt.ALGORITHM_BYTES)
    known, new = file.read(), {}
    rows_of = tuned_rows(sizes)
    machine = f"cuBLASLt {cublaslt.version()}, {torch.cuda.get_device_name(algorithms.workspace.device)}"

    def name(weight: torch.Tensor, num_rows: int) -> str:
        """What a choice depends on."""
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"{machine}, {dtype}, {num_rows} x {weight.shape[0]} x {weight.shape[1]}"

    for weights in groups:
        for num_rows in sorted(set(rows_of.values())):
            key = name(weights[0], num_rows)
            if key not in known:
                new[key] = _fastest(weights, num_rows, algorithms.workspace)
    if new:
        known = file.add(new)
    for weights in groups:
        for size in sizes:
            algorithm = known[name(weights[0], rows_of[size])]
            if algorithm is not None:
                algorithms.add(weights[0], size, algorithm)
    return len(new)


def tuned_rows(sizes: Sequence[int]) -> dict[int, int]:
    """The number of rows that is timed for each size: the next of 1, 2, 4, 8, 16 and every 32, or the largest size."""
    steps = [1, 2, 4, 8, 16, *range(32, max(sizes), 32), max(sizes)]
    return {size: min(step for step in steps if step >= size) for size in sizes}


def _by_shape(weights: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those that cuBLASLt has fast algorithms for; it needs rows of 16 bytes for them."""
    groups = defaultdict(list)
    for weight in weights:
        if weight.dtype in cublaslt.DTYPES and weight.is_contiguous() and not any(size % 8 for size in weight.shape):
            groups[weight.dtype, weight.shape].append(weight)
    return list(groups.values())


def _fastest(weights: Sequence[torch.Tensor], num_rows: int, workspace: torch.Tensor) -> bytes | None:
    """The algorithm for x of so many rows and weights of one shape; None: torch's own."""
    product, (x, out) = _product(weights[0], num_rows), _operands(weights[0], num_rows)

    def time_torch() -> float:
        return _time_us(lambda weight: torch.mm(x, weight.t(), out=out), weights)

    torch_us, candidates = time_torch(), {}
    for algorithm in product.candidates(_WORKSPACE_BYTES):

        def run(weight: torch.Tensor, algorithm: bytes = algorithm) -> None:
            product.run(algorithm, x, weight, out, workspace)

        try:
            candidates[algorithm] = _time_us(run, weights)
        except CublasLtError as error:
            logger.info("an algorithm for %d x %d x %d: %s", num_rows, *weights[0].shape, error)
    return _pick(min(torch_us, time_torch()), candidates)  # twice, since GPUs are slower at first


def _pick(torch_us: float, candidates: Mapping[bytes, float]) -> bytes | None:
    """The fastest candidate, if it is worth it."""
    best = min(candidates, key=candidates.__getitem__, default=None)
    return best if best is not None and candidates[best] * _MIN_GAIN <= torch_us else None


def _time_us(run: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
    """GPU time of one call, from replays of a CUDA graph: the host launches more slowly than small products run.

    Weights take turns, so that they come from memory as in a step, and not from the L2 cache.
    """
    run(weights[0])  # outside first: libraries allocate and load kernels
    num_calls = max(1, min(_MAX_CALLS, _ROTATED_BYTES // weights[0].nbytes))
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


def _product(weight: torch.Tensor, num_rows: int) -> Product:
    return Product(num_rows, weight.shape[0], weight.shape[1], weight.dtype, weight.device)


def _operands(weight: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random x, and memory for the product."""
    generator = torch.Generator(weight.device).manual_seed(0)  # of its own: nobody else's numbers change
    x = torch.randn((num_rows, weight.shape[1]), generator=generator, dtype=weight.dtype, device=weight.device)
    return x, x.new_empty((num_rows, len(weight)))


def _key(x: torch.Tensor, weight: torch.Tensor) -> tuple[object, ...]:
    return x.dtype, x.shape, weight.dtype, weight.shape
