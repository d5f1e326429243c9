"""The matrix of a linear layer in FP8: from a checkpoint that has it so, or put into it while it is loaded.

Used by `linear`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minisgl_batch.layers.base import Part, new_parameter
from minisgl_batch.layers.fp8_config import BLOCK_SIZE, Fp8Config
from minisgl_batch.layers.weight import Source, Weight
from minisgl_kernels.fp8 import GROUP_SIZE, Fp8Matrix, num_groups
from minisgl_kernels.fp8_matmul import fp8_matmul
from minisgl_kernels.matmul import Operand
from minisgl_kernels.quantize_fp8 import quantize

assert BLOCK_SIZE == GROUP_SIZE


class Fp8Weight(Weight):
    """The matrix in FP8 with a scale for each row, or for each row and BLOCK_SIZE columns.

    Scales of whole tensors or blocks are repeated for their rows. So layers with different ones can be merged, and a
    rank's rows may begin anywhere.

    Args:
        shape: (out_features, in_features).
        dtype: of the activations, and of the products.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | None, config: Fp8Config
    ) -> None:
        super().__init__()
        self.shape = shape
        self._dtype, self._config = dtype, config
        self._grouped = config.scales == "block"
        self.reads_fp8 = not self._grouped
        self.values = new_parameter(shape, torch.float8_e4m3fn, device)
        # Transposed, so that a product's kernel finds the scales of neighbouring rows side by side.
        groups = num_groups(shape[1], grouped=self._grouped)
        self.scales = new_parameter((groups, shape[0]), torch.float32, device)

    def multiply(self, x: Operand, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            x = quantize(x, grouped=self._grouped)
        product = fp8_matmul(x, self._matrix, out)
        return product if bias is None else product.add_(bias)

    def factors(self) -> Iterator[Operand]:
        if not self._grouped:
            yield self._matrix

    @property
    def _matrix(self) -> Fp8Matrix:
        return Fp8Matrix(self.values, self.scales.T, self._dtype)

    def parts(self, rows: slice, source: Source) -> Iterator[Part]:
        values, scales = self.values[rows], self.scales.T[rows]
        place = source.dim, source.start, source.sibling
        if not self._config.is_stored:
            yield QuantizedPart("weight", values, source.shape, *place, scales=scales, rounded_to=self._dtype)
            return
        yield Part("weight", values, source.shape, *place)
        block = self._config.block(*source.shape)
        grid = tuple(-(-size // length) for size, length in zip(source.shape, block, strict=True))
        yield ScalesPart("weight_scale", scales, grid, *place, block=block, shape=tuple(values.shape))

    def by_row(self) -> list[torch.Tensor]:
        return [self.values.view(torch.uint8), self.scales.T]


@dataclass(frozen=True, kw_only=True)
class QuantizedPart(Part):
    """A part that is put into FP8 when it is there; the tensor has floats.

    Attributes:
        scales: (rows, num_groups) of the target, filled as well.
        rounded_to: the type that numbers have before.
    """

    scales: torch.Tensor
    rounded_to: torch.dtype

    @property
    def is_fp8(self) -> bool:
        return False

    @property
    def dtype(self) -> torch.dtype:
        return self.rounded_to

    def fill(self, values: torch.Tensor) -> None:
        filled = quantize(values.to(self.target.device, self.dtype), grouped=self.scales.shape[1] > 1)
        self.target.copy_(filled.values)
        self.scales.copy_(filled.scales)


@dataclass(frozen=True, kw_only=True)
class ScalesPart(Part):
    """The scales of a part that is in FP8. `full_shape` is their grid: a scale for each block of the tensor.

    Attributes:
        target: (rows, num_groups), a row for each row of the part.
        block: rows and columns that share a scale.
        shape: of the part.
    """

    block: tuple[int, int]
    shape: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        starts = [self.start if dim == self.dim else 0 for dim in (0, 1)]
        return tuple(
            slice(start // length, -(-(start + size) // length))
            for start, size, length in zip(starts, self.shape, self.block, strict=True)
        )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Scales of channels or tensors come with and without dimensions of 1 at their end."""
        return _without_last_ones(shape) == _without_last_ones(self.full_shape)

    def fault(self, values: torch.Tensor) -> str:
        lowest, highest = (float(end) for end in values.float().aminmax())  # NaN if one is
        return "" if lowest >= 0.0 and highest < math.inf else "has scales that are negative, infinite or no numbers"

    def fill(self, values: torch.Tensor) -> None:
        start = self.start if self.dim == 0 else 0
        rows = torch.arange(start, start + self.shape[0], device=values.device) // self.block[0]
        self.target.copy_(values.reshape(-1, self.target.shape[1])[rows - start // self.block[0]])


def _without_last_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
