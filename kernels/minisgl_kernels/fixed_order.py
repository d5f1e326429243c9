"""Matrix products whose rows depend on nothing but themselves: not on how many others there are, nor on their place.

On a GPU each weight's shape has algorithms of cuBLASLt's for some numbers of rows. They may cut a product differently,
but give the same bits: that is tried on random numbers before one is taken. On a CPU, where a library's kernels depend
on the number of rows, products are made in pieces of one size. Called by the linear layers, through `matmul`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

from minisgl_kernels import cpp, cublaslt, matmul
from minisgl_kernels import triton_support as support
from minisgl_kernels.algorithm_file import AlgorithmFile, Choices
from minisgl_kernels.cublaslt import CublasLtError, Product
from minisgl_kernels.matmul import Operand, Products
from minisgl_kernels.matmul_tiles import matmul_tiles

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
_REFERENCE_ROWS = 256
_MAX_VALUES = 1 << 27  # of a product that algorithms are tried with: 256 MiB
_CPU_ROWS = 16
_WORKSPACE_BYTES = 1 << 20  # nothing is split, so there is next to nothing to keep there


def can_fix_order(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is what products in a fixed order are made with."""
    if device.type == "cuda":
        return support.triton is not None
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def make_fixed_order(weights: Iterable[torch.Tensor], device: torch.device) -> Products:
    """What all products of an engine run by, through `matmul.activate`; on a GPU on one stream.

    Args:
        weights: (out_features, in_features) each; those of other shapes, and those that cuBLASLt isn't good for, are
            multiplied in tiles of our own.
        device: the current one.
    """
    return CpuFixedOrder() if device.type == "cpu" else GpuFixedOrder(weights, device)


def by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of x, whose rows it computes one like the other; in a fixed order on a CPU one after the other.

    There torch has two exponentials: one for whole vectors, and another for what a thread finds left behind them.
    """
    if x.is_cuda or not matmul.keeps_order():
        return function(x)
    return torch.cat([function(row) for row in x.split(1)])


class CpuFixedOrder:
    """Products by oneDNN, in pieces of as many rows, the last ones with zeros behind them.

    Not by MKL, whose sums depend on where a row stands and how it lies in memory.
    """

    keeps_order = True

    def matmul(self, x: Operand, weight: Operand, out: torch.Tensor | None) -> torch.Tensor:
        """The weight may be packed for oneDNN."""
        x, weight = _plain(x), _plain(weight)
        pieces = F.pad(x, (0, 0, 0, -len(x) % _CPU_ROWS)).split(_CPU_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise
        product = torch.cat([multiply(piece, weight, None, "none", [], "") for piece in pieces])[: len(x)]
        return product if out is None else out.copy_(product)


class GpuFixedOrder:
    """Products by algorithms that give the same bits. Arguments as for `make_fixed_order`."""

    keeps_order = True

    def __init__(self, weights: Iterable[torch.Tensor], device: torch.device) -> None:
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._algorithms: dict[tuple[object, ...], dict[int, bytes]] = {}
        self._products: dict[tuple[object, ...], tuple[Product, bytes] | None] = {}
        started, groups = time.perf_counter(), matmul.by_shape(weights)
        try:
            self._choose(groups)
        except (OSError, CublasLtError) as error:
            logger.warning("matrix products run by kernels of our own, since cuBLASLt can't be asked: %s", error)
            self._algorithms.clear()
        took = time.perf_counter() - started
        logger.info("%d shapes of weights have matrix products in a fixed order, in %.1f s", len(groups), took)

    def matmul(self, x: Operand, weight: Operand, out: torch.Tensor | None) -> torch.Tensor:
        x, weight = _plain(x), _plain(weight)
        if not len(x):
            return x.new_empty((0, len(weight))) if out is None else out
        x = _aligned(x)
        made = x.new_empty((len(x), len(weight))) if out is None or _is_elsewhere(out) else out
        sizes = self._algorithms.get(_key(weight))
        if sizes is None or _is_elsewhere(weight):
            matmul_tiles(x, weight, made)
        else:
            for piece, part in zip(x.split(max(sizes)), made.split(max(sizes)), strict=True):
                self._multiply(piece, weight, part, sizes)
        return made if out is None or made is out else out.copy_(made)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, sizes: dict[int, bytes]) -> None:
        num_rows = len(x)
        key = (num_rows, *_key(weight))
        if key not in self._products:
            self._products[key] = self._product(num_rows, weight, sizes)
        found = self._products[key]
        if found is None:
            size = min(size for size in sizes if size > num_rows)
            wide = F.pad(x, (0, 0, 0, size - num_rows))
            made = x.new_empty((size, len(weight)))
            self._multiply(wide, weight, made, sizes)
            out.copy_(made[:num_rows])
        else:
            product, algorithm = found
            product.run(algorithm, x, weight, out, self._workspace)

    def _product(self, num_rows: int, weight: torch.Tensor, sizes: dict[int, bytes]) -> tuple[Product, bytes] | None:
        """By an algorithm of the next sizes that does so many rows too; None: none does."""
        product = matmul.product_of(weight, num_rows)
        for size in sorted(size for size in sizes if size >= num_rows):
            try:
                product.check(sizes[size], _WORKSPACE_BYTES)
            except CublasLtError:
                continue
            return product, sizes[size]
        return None

    def _choose(self, groups: Sequence[list[torch.Tensor]]) -> None:
        file = AlgorithmFile(cpp.cache_dir() / "matmul.json", cublaslt.ALGORITHM_BYTES)
        known = file.read()
        new: Choices = {}
        for weights in groups:
            sizes = _sizes(len(weights[0]))
            names = [f"fixed order: {matmul.describe(weights[0], size)}" for size in sizes]
            if any(name not in known for name in names):
                new.update(zip(names, _algorithms(weights, sizes, self._workspace), strict=True))
        if new:
            known = file.add(new)
        for weights in groups:
            sizes = _sizes(len(weights[0]))
            names = [f"fixed order: {matmul.describe(weights[0], size)}" for size in sizes]
            chosen = {
                size: found for size, name in zip(sizes, names, strict=True) if (found := known[name]) is not None
            }
            if chosen:
                self._algorithms[_key(weights[0])] = chosen


def _sizes(out_features: int) -> list[int]:
    return [size for size in SIZES if size <= _REFERENCE_ROWS or size * out_features <= _MAX_VALUES]


def _algorithms(weights: Sequence[torch.Tensor], sizes: Sequence[int], workspace: torch.Tensor) -> list[bytes | None]:
    """For each size the fastest of the algorithms that give the reference's bits; None: there is none.

    The reference is what the library suggests for `_REFERENCE_ROWS` rows, of all that aren't split.
    """
    weight = weights[0]
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (max(sizes), weight.shape[1])
    x = torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)
    expected = x.new_empty((len(x), len(weight)))
    reference = _reference(weight, x, expected, workspace)
    if reference is None:
        return [None] * len(sizes)
    return [_fastest(reference, x[:size], expected[:size], weights, workspace) for size in sizes]


def _fastest(
    reference: bytes,
    x: torch.Tensor,
    expected: torch.Tensor,
    weights: Sequence[torch.Tensor],
    workspace: torch.Tensor,
) -> bytes | None:
    """The fastest algorithm for so many rows that gives what is expected of x and the first weight."""
    product, out = matmul.product_of(weights[0], len(x)), torch.empty_like(expected)
    times: dict[bytes, float] = {}
    for algorithm in (reference, *product.candidates(workspace.nbytes, splits=False)):

        def run(weight: torch.Tensor, algorithm: bytes = algorithm) -> None:
            product.run(algorithm, x, weight, out, workspace)

        try:
            product.check(algorithm, workspace.nbytes)
            run(weights[0])
            if torch.equal(out, expected):
                times[algorithm] = matmul.time_us(run, weights)
        except CublasLtError as error:
            logger.info("an algorithm for %d x %d x %d: %s", len(x), *weights[0].shape, error)
    return min(times, key=times.__getitem__, default=None)


def _reference(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> bytes | None:
    """Put x @ weight.T into `out` by the reference, and return it."""
    product = matmul.product_of(weight, _REFERENCE_ROWS)
    candidates = product.candidates(workspace.nbytes, splits=False)
    if not candidates:
        return None
    for start in range(0, len(x), _REFERENCE_ROWS):
        rows = slice(start, start + _REFERENCE_ROWS)
        product.run(candidates[0], x[rows], weight, out[rows], workspace)
    return candidates[0]


def _plain(matrix: Operand) -> torch.Tensor:
    """The engine refuses those in FP8."""
    assert isinstance(matrix, torch.Tensor)
    return matrix


def _key(weight: torch.Tensor) -> tuple[object, ...]:
    return weight.dtype, weight.shape


def _is_elsewhere(x: torch.Tensor) -> bool:
    """Whether cuBLASLt can't take it as it lies."""
    return not x.is_contiguous() or x.data_ptr() % cublaslt.ALIGNMENT_BYTES != 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x) if _is_elsewhere(x) else x
