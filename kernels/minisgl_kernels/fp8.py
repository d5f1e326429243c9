"""What a matrix in FP8 is: values of 8 bits and the float32 scales that they are multiplied with.

Knows neither kernels nor layers. Used by both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP_SIZE = 128  # columns that share a scale in a row, where not all of a row do
SMALLEST_MAX = 1e-12  # rows and groups whose largest number is less are scaled as if it were this


@dataclass(frozen=True)
class Fp8Matrix:
    """values * scales.

    Attributes:
        values: (num_rows, size) e4m3.
        scales: (num_rows, num_groups) float32: a scale per row, or per row and GROUP_SIZE columns.
        dtype: of what it stands for, and of products.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)


def num_groups(size: int, *, grouped: bool) -> int:
    """How many scales a row of `size` columns has."""
    return -(-size // GROUP_SIZE) if grouped else 1
