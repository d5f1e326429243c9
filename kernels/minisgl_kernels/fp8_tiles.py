"""Products of matrices in FP8 by tiles of ours: for decode steps' few rows, and where columns have scales in groups.

A tile of the product has its rows from the weight and its columns from x, so that the tensor cores take a weight's rows
64 at a time and few rows of x waste little. Long sums can be split over several programs: each leaves its part in the
workspace, and whoever comes last adds them up in order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch

from minisgl_kernels import triton_support as support
from minisgl_kernels.fp8 import GROUP_SIZE, Fp8Matrix
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit_for_any, tl

_MAX_ROWS = 256
_PROCESSORS = 132  # of an H200, which the choice of splits is made for
_MARK, _NUMBERS = b"our tiles", struct.Struct("<6H")


class Tiles(NamedTuple):
    """How a product is cut: a tile's rows of x, rows of the weight and columns of both at a time."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int

    def to_bytes(self, length: int) -> bytes:
        """As an algorithm of `matmul`'s."""
        return (_MARK + _NUMBERS.pack(*self)).ljust(length, b"\0")

    @classmethod
    def from_bytes(cls, algorithm: bytes) -> Tiles | None:
        """None: it is somebody else's."""
        if not algorithm.startswith(_MARK):
            return None
        return cls(*_NUMBERS.unpack_from(algorithm, len(_MARK)))

    def num_tiles(self, num_rows: int, out_features: int) -> int:
        return -(-num_rows // self.rows) * -(-out_features // self.columns)

    def workspace_bytes(self, num_rows: int, out_features: int) -> int:
        """What the parts of sums take."""
        tiles = self.num_tiles(num_rows, out_features)
        return 4 * tiles * self.splits * self.rows * self.columns if self.splits > 1 else 0


def plain_tiles(num_rows: int) -> Tiles:
    """Good enough for any product."""
    rows = min(128, max(16, support.next_power_of_2(num_rows)))
    return Tiles(rows, 128 if rows == 128 else 64, GROUP_SIZE, 1, 8 if rows == 128 else 4, 4)


def candidates(num_rows: int, out_features: int, in_features: int, workspace_bytes: int) -> Iterator[Tiles]:
    """Those that may be the fastest for rows with one scale each."""
    rows = min(_MAX_ROWS, max(16, support.next_power_of_2(num_rows)))
    shapes = {256: [(64, 128, 4, 4), (128, 128, 8, 3)], 128: [(64, 128, 4, 5), (128, 128, 8, 4)]}
    for columns, depth, num_warps, num_stages in shapes.get(rows, [(64, 128, 4, 6), (64, 256, 4, 4)]):
        for splits in (1, 2, 3, 4, 6, 8):
            tiles = Tiles(rows, columns, depth, splits, num_warps, num_stages)
            fits = tiles.workspace_bytes(num_rows, out_features) <= workspace_bytes
            is_useful = tiles.num_tiles(num_rows, out_features) * splits <= 5 * _PROCESSORS
            if splits == 1 or (fits and is_useful and in_features >= 4 * splits * depth):
                yield tiles


def fp8_tiles(
    x: Fp8Matrix,
    weight: Fp8Matrix,
    out: torch.Tensor,
    tiles: Tiles,
    workspace: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
) -> None:
    """Put x @ weight.T into `out`.

    Args:
        x: (num_rows, in_features).
        weight: (out_features, in_features), with as many scales in a row.
        out: (num_rows, out_features), contiguous.
        tiles: with a depth of GROUP_SIZE where columns have scales in groups.
        workspace: (num_bytes,) uint8 for parts of sums, where they are split.
        arrivals: int32 zeros, one for each tile; they are zeros again afterwards.
    """
    num_rows, out_features = out.shape
    grouped = x.scales.shape[1] > 1
    pdl = support.uses_pdl(out)
    _kernel[(tiles.num_tiles(num_rows, out_features), tiles.splits)](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        out,
        workspace.view(torch.float32) if workspace is not None and tiles.splits > 1 else None,
        arrivals if tiles.splits > 1 else None,
        num_rows,
        out_features,
        x.shape[1],
        x.scales.stride(0),
        x.scales.stride(1) if grouped else 0,
        weight.scales.stride(0),
        weight.scales.stride(1) if grouped else 0,
        tiles.splits,
        grouped=grouped,
        even=x.shape[1] % tiles.depth == 0,
        rows=tiles.rows,
        columns=tiles.columns,
        depth=tiles.depth,
        pdl=pdl,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=pdl,
    )


@jit_for_any("num_rows", "splits", "x_row_stride")
def _kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    workspace: tl.tensor | None,
    arrivals: tl.tensor | None,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    size: tl.tensor,
    x_row_stride: tl.tensor,
    x_group_stride: tl.tensor,
    weight_row_stride: tl.tensor,
    weight_group_stride: tl.tensor,
    splits: tl.tensor,
    grouped: tl.constexpr,
    even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per tile and split; tiles of the same rows of the weight are neighbours."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(num_rows, rows)
    row = tile % row_tiles * rows + tl.arange(0, rows)
    column = tile // row_tiles * columns + tl.arange(0, columns)
    inner = tl.arange(0, depth)
    # Rows beyond the last are the last once more, and aren't stored: loads without masks are faster.
    row_here, column_here = tl.minimum(row, num_rows - 1), tl.minimum(column, out_features - 1)
    xs = x + row_here.to(tl.int64)[:, None] * size + inner[None, :]
    weights = weight + column_here.to(tl.int64)[:, None] * size + inner[None, :]
    x_scales += row_here * x_row_stride
    weight_scales += column_here * weight_row_stride
    num_steps = tl.cdiv(size, depth)
    steps = tl.cdiv(num_steps, splits)
    first = split * steps
    sums = tl.zeros((columns, rows), tl.float32)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    for step in range(first, tl.minimum(first + steps, num_steps)):
        if even:
            a, b = tl.load(weights + step * depth), tl.load(xs + step * depth)
        else:
            inside = inner[None, :] < size - step * depth
            a = tl.load(weights + step * depth, mask=inside, other=0.0)
            b = tl.load(xs + step * depth, mask=inside, other=0.0)
        if grouped:
            a_scale = tl.load(weight_scales + step * weight_group_stride)
            b_scale = tl.load(x_scales + step * x_group_stride)
            sums += tl.dot(a, tl.trans(b)) * (a_scale[:, None] * b_scale[None, :])
        else:
            sums = tl.dot(a, tl.trans(b), sums)
    is_last = True
    if workspace is not None:
        spots = tl.arange(0, columns)[:, None] * rows + tl.arange(0, rows)[None, :]
        parts = workspace + tile.to(tl.int64) * splits * (columns * rows) + spots
        tl.store(parts + split * (columns * rows), sums)
        tl.debug_barrier()  # all of it is there before this program says so
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            sums = tl.zeros((columns, rows), tl.float32)
            for part in range(splits):
                sums += tl.load(parts + part * (columns * rows), cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if is_last:
        if not grouped:
            sums *= tl.load(weight_scales)[:, None] * tl.load(x_scales)[None, :]
        where = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
        inside = (row < num_rows)[:, None] & (column < out_features)[None, :]
        tl.store(where, tl.trans(sums).to(out.dtype.element_ty), mask=inside)
