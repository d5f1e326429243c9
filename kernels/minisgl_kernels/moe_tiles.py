"""The experts' matrix product in tiles, for any sizes and float types: Triton.

A program has a block of an expert's rows, as `moe_routing` cuts them, and a tile of columns. Called by `fused_moe`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_kernels import triton_support as support
from minisgl_kernels.moe_routing import Routing
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_FEW_ROWS = 40  # of an expert: until so many reading weights takes the time, and the tensor cores beyond


class Cut(NamedTuple):
    """How a matrix product is cut.

    Attributes:
        columns: of the result that a program computes.
        depth: of the products that it adds up at a time.
        group: how many blocks of rows take turns at the same columns, while these are in the L2 cache; divides 16.
    """

    columns: int
    depth: int
    group: int
    num_warps: int
    num_stages: int


class Tile(NamedTuple):
    """How both matrix products are cut.

    Attributes:
        unit: an expert's rows are padded to a multiple of so many.
        units: of rows that a program has, at most 3.
        first, second: the cuts of the two.
    """

    unit: int
    units: int
    first: Cut
    second: Cut


def tile_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """The tile for so many pairs of token and expert. Depends on nothing else, so CUDA graphs may hold it.

    While few rows go to an expert, reading weights is what takes time: a unit shall hold all of them, so that each
    weight is read once, and many small programs keep the memory busy. With many rows it is the tensor cores, and the
    L2 cache that feeds them: the larger a tile, the less it reads.
    """
    rows = num_pairs / num_experts  # if they are spread evenly
    if dtype == torch.float32:  # takes twice the registers and shared memory, and no tensor cores
        return _alike(32, 1, Cut(32, 32, group=4, num_warps=4, num_stages=2))
    if rows <= 1:
        return _alike(16, 1, Cut(32, 256, group=1, num_warps=4, num_stages=3))
    if rows <= 5:
        return _alike(16, 1, Cut(64, 128, group=1, num_warps=4, num_stages=4))
    if rows <= 20:
        return _alike(32, 1, Cut(64, 128, group=1, num_warps=4, num_stages=4))
    if rows <= _FEW_ROWS:
        return _alike(64, 1, Cut(128, 64, group=4, num_warps=4, num_stages=4))
    return _alike(64, 3, Cut(256, 64, group=8, num_warps=8, num_stages=4))


def _alike(unit: int, units: int, cut: Cut) -> Tile:
    return Tile(unit, units, first=cut, second=cut)


def moe_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    activation: tuple[float, float] | None,
    *,
    is_first: bool,
    tile: Tile,
) -> None:
    """As `grouped_product.grouped_product`, with a routing that is cut by `tile`; any sizes, and float32 too."""
    cut = tile.first if is_first else tile.second
    _, size_n, size_k = weight.shape
    num_blocks = -(-routing.max_blocks // cut.group) * cut.group
    alpha, limit = activation or (0.0, 0.0)
    pdl = support.uses_pdl(x)
    _product_kernel[(num_blocks * -(-size_n // cut.columns),)](
        x,
        weight,
        bias,
        out,
        routing.members,
        routing.blocks,
        routing.members.stride(0),
        routing.blocks.stride(0),
        size_k,
        size_n=size_n,
        unit=tile.unit,
        units=tile.units,
        block_n=cut.columns,
        block_k=cut.depth,
        even=size_k % cut.depth == 0,
        group=cut.group,
        is_first=is_first,
        alpha=alpha,
        limit=limit,
        pdl=pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=pdl,
    )


@jit
def _product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    members: tl.tensor,
    blocks: tl.tensor,
    member_stride: tl.tensor,
    block_stride: tl.tensor,
    size_k: tl.tensor,
    size_n: tl.constexpr,
    unit: tl.constexpr,
    units: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    even: tl.constexpr,
    group: tl.constexpr,
    is_first: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per block of rows and tile of columns: out = x @ weight[expert].T + bias, activated if `is_first`.

    The depth isn't a constant, for a loop that is known to be short would be unrolled, and take long to compile.
    """
    # Blocks of rows take turns fastest within a group, so that those of one expert share its weights in the cache.
    num_columns: tl.constexpr = (size_n + block_n - 1) // block_n
    place = tl.program_id(0) % (group * num_columns)
    block = tl.program_id(0) // (group * num_columns) * group + place % group
    column = place // group * block_n
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    num_rows = tl.load(blocks + block)
    if num_rows == 0:
        return
    expert = tl.load(blocks + block_stride + block).to(tl.int64)
    first_row = tl.load(blocks + 3 * block_stride + block).to(tl.int64)
    members += expert * member_stride + tl.load(blocks + 2 * block_stride + block)
    weight += expert * (size_n * size_k)
    if bias is not None:
        bias += expert * size_n
    if is_first:
        out += first_row * (size_n // 2)
    else:
        out += first_row * size_n
        x += first_row * size_k
    two: tl.constexpr = 2 * unit
    operands = (x, weight, bias, out, members)
    if units == 1 or num_rows <= unit:
        _product(operands, num_rows, column, size_k, size_n, unit, 0, block_n, block_k, even, is_first, alpha, limit)
    elif units == 2 or num_rows <= two:
        _product(operands, num_rows, column, size_k, size_n, two, 0, block_n, block_k, even, is_first, alpha, limit)
    else:
        _product(operands, num_rows, column, size_k, size_n, two, unit, block_n, block_k, even, is_first, alpha, limit)


@jit
def _product(
    operands: tl.tuple,
    num_rows: tl.tensor,
    column: tl.tensor,
    size_k: tl.tensor,
    size_n: tl.constexpr,
    block_m: tl.constexpr,
    more_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    even: tl.constexpr,
    is_first: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """The first `num_rows` rows of a tile from `column` on. Rows beyond are neither read nor written.

    A tile has `block_m + more_m` rows, in two parts, since a tensor's size must be a power of two.
    """
    x, weight, bias, out, members = operands
    ks = tl.arange(0, block_k)
    columns = column + tl.arange(0, block_n)
    w_columns = columns if size_n % block_n == 0 else columns % size_n
    w_places = weight + w_columns[None, :] * size_k + ks[:, None]
    rows = tl.arange(0, block_m)
    places, inside = _row_places(x, members, rows, num_rows, size_k, is_first)
    places = places + ks[None, :]
    acc = tl.zeros((block_m, block_n), tl.float32)
    if more_m:
        more_rows = block_m + tl.arange(0, more_m)
        more_places, more_inside = _row_places(x, members, more_rows, num_rows, size_k, is_first)
        more_places = more_places + ks[None, :]
        more_acc = tl.zeros((more_m, block_n), tl.float32)
    for k in range(0, size_k, block_k):
        if even:
            w = tl.load(w_places)
            part = tl.load(places, mask=inside, other=0.0)
        else:
            deep = ks < size_k - k
            w = tl.load(w_places, mask=deep[:, None], other=0.0)
            part = tl.load(places, mask=inside & deep[None, :], other=0.0)
        acc = tl.dot(part, w, acc, input_precision="ieee")
        if more_m:
            if even:
                more_part = tl.load(more_places, mask=more_inside, other=0.0)
            else:
                more_part = tl.load(more_places, mask=more_inside & deep[None, :], other=0.0)
            more_acc = tl.dot(more_part, w, more_acc, input_precision="ieee")
            more_places += block_k
        places += block_k
        w_places += block_k
    _store(out, acc, bias, rows, num_rows, column, size_n, is_first, alpha, limit)
    if more_m:
        _store(out, more_acc, bias, more_rows, num_rows, column, size_n, is_first, alpha, limit)


@jit
def _row_places(
    x: tl.tensor,
    members: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    size_k: tl.tensor,
    is_first: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the rows of x begin, (rows, 1), and which of them there are."""
    inside = rows < num_rows
    sources = rows
    if is_first:
        sources = tl.load(members + rows, mask=inside, other=0).to(tl.int64)
    return x + sources[:, None] * size_k, inside[:, None]


@jit
def _store(
    out: tl.tensor,
    acc: tl.tensor,
    bias: tl.tensor | None,
    rows: tl.tensor,
    num_rows: tl.tensor,
    column: tl.tensor,
    size_n: tl.constexpr,
    is_first: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Add the bias, activate if `is_first`, round and write.

    See `fused_moe.ClampedSwiglu`; `alpha` 0 stands for silu(gate) * up.
    """
    width: tl.constexpr = size_n
    if bias is not None:
        places = column + tl.arange(0, acc.shape[1])
        acc += tl.load(bias + places, mask=places < size_n, other=0.0).to(tl.float32)[None, :]
    if is_first:
        # Neighbours in a row of the result are gate and up: one thread holds both.
        gate, up = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
        if alpha == 0.0:
            acc = gate / (1.0 + tl.exp(-gate)) * up
        else:
            gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit)
            acc = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
        column, width = column // 2, size_n // 2
    columns = column + tl.arange(0, acc.shape[1])
    places = out + rows[:, None] * width + columns[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < width)[None, :])
