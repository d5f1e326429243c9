"""Residual addition and RMS norm in one pass over the residual stream: Triton, or the twin."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_kernels import reference
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, then normalise the sum.

    The sum is rounded to x's dtype before it is normalised, and the norm before it is scaled: the order of the models'
    reference code. Moves 4 elements per element of x (2 without a residual).

    Args:
        x: (num_tokens, size), each row contiguous; any float dtype.
        residual: the same shape and dtype, contiguous, changed in place; None where x itself starts the stream.
        weight: (size,), x's dtype.
        eps: added to the mean square.

    Returns:
        The normalised sum, (num_tokens, size), and the stream: `residual`, or `x` where there was none.
    """
    if not support.runs_kernels(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    num_tokens, size = x.shape
    block = support.next_power_of_2(size)
    normed = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens:
        pdl = support.uses_pdl(x)
        _kernel[(num_tokens,)](
            x,
            x if residual is None else residual,
            weight,
            normed,
            x.stride(0),
            eps,
            size=size,
            block=block,
            has_residual=residual is not None,
            pdl=pdl,
            num_warps=min(16, max(1, block // 256)),  # 8 elements, 16 bytes of bf16, per thread
            launch_pdl=pdl,
        )
    return normed, x if residual is None else residual


@jit
def _kernel(
    x: Any,
    residual: Any,
    weight: Any,
    normed: Any,
    x_stride: Any,
    eps: Any,
    size: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    dtype = normed.dtype.element_ty
    scale = tl.load(weight + columns, mask=inside).to(tl.float32)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        stream = residual + row * size + columns
        summed = (values + tl.load(stream, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(stream, summed, mask=inside)
        values = summed.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    rounded = (values * inverse).to(dtype).to(tl.float32)
    tl.store(normed + row * size + columns, (rounded * scale).to(dtype), mask=inside)
