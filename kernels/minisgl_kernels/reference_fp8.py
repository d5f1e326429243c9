"""Plain twins of the FP8 kernels, in torch: what the kernels are tested against, and what CPUs run."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_kernels.e4m3 import E4M3, E4M3_MAX
from minisgl_kernels.fp8 import GROUP_SIZE, SMALLEST_MAX, Fp8Matrix, num_groups


def quantize(x: torch.Tensor, *, grouped: bool) -> Fp8Matrix:
    """The twin of `minisgl_kernels.quantize_fp8.quantize`."""
    groups = _in_groups(x.float(), num_groups(x.shape[1], grouped=grouped))
    scales = groups.abs().amax(-1).clamp_(min=SMALLEST_MAX).div_(E4M3_MAX)
    values = (groups / scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
    return Fp8Matrix(values.to(E4M3), scales, x.dtype)


def dequantize(matrix: Fp8Matrix) -> torch.Tensor:
    """What the matrix stands for: (num_rows, size) float32."""
    groups = _in_groups(matrix.values.float(), matrix.scales.shape[1])
    return groups.mul_(matrix.scales.unsqueeze(-1)).flatten(1)[:, : matrix.values.shape[1]]


def matmul(x: Fp8Matrix, weight: Fp8Matrix) -> torch.Tensor:
    """The twin of `minisgl_kernels.fp8_matmul.fp8_matmul`; sums are float32."""
    return F.linear(dequantize(x), dequantize(weight)).to(x.dtype)


def _in_groups(x: torch.Tensor, number: int) -> torch.Tensor:
    """(num_rows, size) -> (num_rows, number, columns of a group), with zeros behind the last column."""
    if number == 1:
        return x.unsqueeze(1)
    padded = F.pad(x, (0, number * GROUP_SIZE - x.shape[1]))
    return padded.view(len(x), number, GROUP_SIZE)
