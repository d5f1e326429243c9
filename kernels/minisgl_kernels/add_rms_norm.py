"""Residual addition and RMS norm in one pass over the residual stream, also into FP8: CUDA C++, Triton, or the twin."""

from __future__ import annotations

import torch

from minisgl_kernels import cuda, reference, reference_fp8
from minisgl_kernels import triton_support as support
from minisgl_kernels.e4m3 import E4M3, E4M3_MAX
from minisgl_kernels.fp8 import SMALLEST_MAX, Fp8Matrix
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_MAX_CUDA_SIZE = 32768  # four vectors of 8 elements for each of 1024 threads


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, then normalise the sum.

    The sum is rounded to x's dtype before it is normalised, and the norm to the weight's before it is scaled: the order
    of the models' reference code. Moves 4 elements per element of x (2 without a residual).

    Args:
        x: (num_tokens, size), each row contiguous; any float dtype.
        residual: the same shape and dtype, contiguous, changed in place; None where x itself starts the stream.
        weight: (size,), x's dtype or float32.
        eps: added to the mean square.

    Returns:
        The normalised sum, (num_tokens, size), and the stream: `residual`, or `x` where there was none.
    """
    if not support.runs_kernels(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    num_tokens, size = x.shape
    stream = x if residual is None else residual
    normed = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return normed, stream
    kernels = _cuda_kernels(x, weight)
    if kernels is not None:
        kernels.add_rms_norm(x, stream, weight, normed, eps, residual is not None)
    else:
        _launch(x, stream, weight, normed, eps, residual is not None)
    return normed, stream


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[Fp8Matrix, torch.Tensor]:
    """`add_rms_norm` and `quantize_fp8.quantize` of the normalised sum, with a scale per row."""
    if not support.runs_kernels(x):
        normed, stream = reference.add_rms_norm(x, residual, weight, eps)
        return reference_fp8.quantize(normed, grouped=False), stream
    stream = x if residual is None else residual
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if not len(x):
        return Fp8Matrix(values, scales, x.dtype), stream
    kernels = _cuda_kernels(x, weight)
    if kernels is not None:
        kernels.add_rms_norm_fp8(x, stream, weight, values, scales, eps, residual is not None)
    else:
        _launch(x, stream, weight, values, eps, residual is not None, scales)
    return Fp8Matrix(values, scales, x.dtype), stream


def _cuda_kernels(x: torch.Tensor, weight: torch.Tensor) -> cuda.LayerKernels | None:
    """Those in CUDA C++, where they can take these tensors."""
    size = x.shape[1]
    fits = size % 8 == 0 and x.stride(0) % 8 == 0 and size <= _MAX_CUDA_SIZE and weight.dtype == x.dtype
    return cuda.layer_kernels(x) if fits else None


def _launch(
    x: torch.Tensor,
    stream: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor,
    eps: float,
    has_residual: bool,
    scales: torch.Tensor | None = None,
) -> None:
    num_tokens, size = x.shape
    block = support.next_power_of_2(size)
    pdl = support.uses_pdl(x)
    _kernel[(num_tokens,)](
        x,
        stream,
        weight,
        normed,
        scales,
        x.stride(0),
        eps,
        size=size,
        block=block,
        has_residual=has_residual,
        largest=E4M3_MAX,
        smallest_max=SMALLEST_MAX,
        pdl=pdl,
        num_warps=min(16, max(1, block // 256)),  # 8 elements, 16 bytes of bf16, per thread
        launch_pdl=pdl,
    )


@jit
def _kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    scales: tl.tensor | None,
    x_stride: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    largest: tl.constexpr,
    smallest_max: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    dtype = x.dtype.element_ty
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
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
    rounded = (values * inverse).to(weight.dtype.element_ty).to(tl.float32)
    result = (rounded * scale).to(dtype)
    if scales is not None:
        numbers = result.to(tl.float32)
        fp8_scale = tl.maximum(tl.max(tl.abs(numbers), axis=0), smallest_max) / largest  # 0 where it isn't inside
        tl.store(scales + row, fp8_scale)
        result = (numbers / fp8_scale).to(normed.dtype.element_ty)
    tl.store(normed + row * size + columns, result, mask=inside)
