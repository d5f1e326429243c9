"""Rows into FP8, each by its own scale or scales: Triton, or the twin."""

from __future__ import annotations

import torch

from minisgl_kernels import reference_fp8
from minisgl_kernels import triton_support as support
from minisgl_kernels.e4m3 import E4M3, E4M3_MAX
from minisgl_kernels.fp8 import GROUP_SIZE, SMALLEST_MAX, Fp8Matrix, num_groups
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_GROUPS_PER_PROGRAM = 8


def quantize(x: torch.Tensor, *, grouped: bool) -> Fp8Matrix:
    """The rows in FP8; a scale maps the largest magnitude that it covers to the largest number of the type.

    Args:
        x: (num_rows, size), each row contiguous; any float dtype.
        grouped: every GROUP_SIZE columns have a scale of their own; else a row has one.
    """
    if not support.runs_kernels(x):
        return reference_fp8.quantize(x, grouped=grouped)
    (num_rows, size), number = x.shape, num_groups(x.shape[1], grouped=grouped)
    values = torch.empty((num_rows, size), dtype=E4M3, device=x.device)
    scales = torch.empty((num_rows, number), dtype=torch.float32, device=x.device)
    if not num_rows:
        return Fp8Matrix(values, scales, x.dtype)
    pdl = support.uses_pdl(x)
    per_program = min(_GROUPS_PER_PROGRAM, support.next_power_of_2(number)) if number > 1 else 1
    columns = GROUP_SIZE if number > 1 else support.next_power_of_2(size)
    programs = -(-number // per_program)
    _kernel[(num_rows * programs,)](
        x,
        values,
        scales,
        x.stride(0),
        size=size,
        num_groups=number,
        groups=per_program,
        columns=columns,
        programs=programs,
        largest=E4M3_MAX,
        smallest_max=SMALLEST_MAX,
        pdl=pdl,
        num_warps=min(16, max(1, per_program * columns // 256)),
        launch_pdl=pdl,
    )
    return Fp8Matrix(values, scales, x.dtype)


@jit
def _kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    size: tl.constexpr,
    num_groups: tl.constexpr,
    groups: tl.constexpr,
    columns: tl.constexpr,
    programs: tl.constexpr,
    largest: tl.constexpr,
    smallest_max: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row and `groups` groups of its columns."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    group = tl.program_id(0) % programs * groups + tl.arange(0, groups)
    column = group[:, None] * columns + tl.arange(0, columns)[None, :]
    inside = column < size
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), axis=1), smallest_max) / largest
    tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)
    tl.store(values + row * size + column, (numbers / scale[:, None]).to(values.dtype.element_ty), mask=inside)
