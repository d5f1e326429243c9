"""Matrix products in tiles of one size, whatever the number of rows: Triton, or the twin.

For what must not depend on the other rows and isn't cuBLASLt's: float32, and weights of odd shapes.
"""

from __future__ import annotations

import torch

from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import jit, tl

_BLOCK_ROWS, _BLOCK_COLUMNS, _BLOCK_DEPTH = 64, 64, 64


def matmul_tiles(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Put x @ weight.T into `out`. A row of it depends on the same row of x alone, to the last bit.

    Args:
        x: (num_rows, in_features), each row contiguous; float32, float16 or bfloat16.
        weight: (out_features, in_features), likewise, of the same type.
        out: (num_rows, out_features), likewise.
    """
    if not support.runs_kernels(x):
        out.copy_(x @ weight.t())
        return
    num_rows, depth = x.shape
    grid = (-(-num_rows // _BLOCK_ROWS), -(-len(weight) // _BLOCK_COLUMNS))
    _kernel[grid](
        x,
        weight,
        out,
        num_rows,
        len(weight),
        depth,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        block_rows=_BLOCK_ROWS,
        block_columns=_BLOCK_COLUMNS,
        block_depth=_BLOCK_DEPTH if x.dtype.itemsize == 2 else _BLOCK_DEPTH // 2,
        num_warps=4,
        num_stages=3,
    )


@jit
def _kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
) -> None:
    """One program per tile; rows take turns fastest, so that a weight's tile is read from memory once."""
    rows = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)
    columns = (tl.program_id(1) * block_columns + tl.arange(0, block_columns)).to(tl.int64)
    ks = tl.arange(0, block_depth)
    acc = tl.zeros((block_rows, block_columns), tl.float32)
    for k in range(0, depth, block_depth):
        deep = ks < depth - k
        part = tl.load(
            x + rows[:, None] * x_stride + (k + ks)[None, :],
            mask=(rows < num_rows)[:, None] & deep[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + columns[None, :] * weight_stride + (k + ks)[:, None],
            mask=(columns < num_columns)[None, :] & deep[:, None],
            other=0.0,
        )
        acc = tl.dot(part, w, acc, input_precision="ieee")
    places = out + rows[:, None] * out_stride + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside)
