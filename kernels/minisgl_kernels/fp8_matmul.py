"""Products of matrices in FP8: a library's or ours, or the twin."""

from __future__ import annotations

import torch

from minisgl_kernels import reference_fp8
from minisgl_kernels import triton_support as support
from minisgl_kernels.fp8 import Fp8Matrix
from minisgl_kernels.fp8_tiles import fp8_tiles, plain_tiles
from minisgl_kernels.matmul import matmul

_ALIGNMENT = 16  # of sizes, for libraries


def fp8_matmul(x: Fp8Matrix, weight: Fp8Matrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T.

    Args:
        x: (num_rows, in_features).
        weight: (out_features, in_features), with as many scales in a row.
        out: where to put it.

    Returns:
        (num_rows, out_features) of x's dtype; `out` if it is given.
    """
    if not support.runs_kernels(x.values):
        product = reference_fp8.matmul(x, weight)
        return product if out is None else out.copy_(product)
    if x.scales.shape[1] == 1 and not any(size % _ALIGNMENT for size in weight.shape):
        return matmul(x, weight, out)
    if out is None:
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.values.device)
    if len(out):
        fp8_tiles(x, weight, out, plain_tiles(len(x)))
    return out
