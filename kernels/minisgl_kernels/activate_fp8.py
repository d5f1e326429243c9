"""The gated activations of MLPs, put into FP8 row by row in the same kernel: CUDA C++, Triton, or the twins."""

from __future__ import annotations

import torch

from minisgl_kernels import cuda, reference, reference_fp8
from minisgl_kernels import triton_support as support
from minisgl_kernels.e4m3 import E4M3, E4M3_MAX
from minisgl_kernels.fp8 import SMALLEST_MAX, Fp8Matrix
from minisgl_kernels.silu_and_mul import activate
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_BLOCK = 4096
_MAX_CUDA_WIDTH = 32768  # four vectors of 8 elements for each of 1024 threads


def activate_fp8(gate_up: torch.Tensor, *, gelu: bool) -> Fp8Matrix:
    """`silu_and_mul` or `gelu_and_mul`, and `quantize_fp8.quantize` of the result, with a scale per row.

    Args:
        gate_up: (num_tokens, 2 * width), contiguous; any float dtype.
        gelu: which of them.
    """
    if not support.runs_kernels(gate_up):
        twin = reference.gelu_and_mul if gelu else reference.silu_and_mul
        return reference_fp8.quantize(twin(gate_up), grouped=False)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    values = torch.empty((num_tokens, width), dtype=E4M3, device=gate_up.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=gate_up.device)
    fits = width % 8 == 0 and width <= _MAX_CUDA_WIDTH
    kernels = cuda.layer_kernels(gate_up) if fits and num_tokens else None
    if kernels is not None:
        kernels.activate_fp8(gate_up, values, scales, gelu)
    elif num_tokens:
        block, pdl = min(_BLOCK, support.next_power_of_2(width)), support.uses_pdl(gate_up)
        _kernel[(num_tokens,)](
            gate_up,
            values,
            scales,
            width=width,
            block=block,
            gelu=gelu,
            largest=E4M3_MAX,
            smallest_max=SMALLEST_MAX,
            pdl=pdl,
            num_warps=max(1, block // 512),
            launch_pdl=pdl,
        )
    return Fp8Matrix(values, scales, gate_up.dtype)


@jit
def _activated(gates: tl.tensor, columns: tl.tensor, width: tl.constexpr, gelu: tl.constexpr) -> tl.tensor:
    """float32, rounded as `silu_and_mul` does; 0 beyond the width."""
    inside = columns < width
    gate = tl.load(gates + columns, mask=inside, other=0.0)
    up = tl.load(gates + width + columns, mask=inside, other=0.0)
    return activate(gate, up, gelu).to(tl.float32)


@jit
def _kernel(
    gate_up: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    gelu: tl.constexpr,
    largest: tl.constexpr,
    smallest_max: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row, which it reads twice: from memory for its scale, from the cache for the values."""
    row = tl.program_id(0).to(tl.int64)
    gates = gate_up + row * 2 * width
    columns = tl.arange(0, block)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    largest_here = tl.full((block,), smallest_max, tl.float32)
    for start in range(0, width, block):
        largest_here = tl.maximum(largest_here, tl.abs(_activated(gates, start + columns, width, gelu)))
    scale = tl.max(largest_here, axis=0) / largest
    tl.store(scales + row, scale)
    for start in range(0, width, block):
        result = _activated(gates, start + columns, width, gelu) / scale
        here = start + columns
        tl.store(values + row * width + here, result.to(values.dtype.element_ty), mask=here < width)
