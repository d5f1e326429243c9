"""The experts of a mixture, each applied to the tokens that its router sends there: Triton, or the twin.

The tokens are sorted by expert into blocks of rows (`moe_routing`). Two grouped matrix products follow, a program per
block and tile of columns: the first one's rows are gathered and activated, the second one's stay in the order of the
experts; and a sum that gathers each token's rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_kernels import reference_moe
from minisgl_kernels import triton_support as support
from minisgl_kernels.moe_routing import Routing, max_blocks, route
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_SUM_BLOCK = 1024  # columns of a program of the sum


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
        rows: of a block, which a program has as a whole.
        halves: blocks that are at most half full are computed as half a block.
        first, second: the cuts of the two.
    """

    rows: int
    halves: bool
    first: Cut
    second: Cut


def tile_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """The tile for so many pairs of token and expert. Depends on nothing else, so CUDA graphs may hold it.

    While few rows go to an expert, reading weights is what takes time: a block shall hold all of them, so that each
    weight is read once, and many small programs keep the memory busy. With many rows the tensor cores count.
    """
    rows = num_pairs / num_experts  # if they are spread evenly
    if dtype == torch.float32:  # takes twice the registers and shared memory, and no tensor cores
        return _alike(32, Cut(32, 32, group=4, num_warps=4, num_stages=2))
    if rows <= 1:
        return _alike(16, Cut(32, 256, group=1, num_warps=4, num_stages=3))
    if rows <= 5:
        return _alike(16, Cut(64, 128, group=1, num_warps=4, num_stages=4))
    if rows <= 20:
        return _alike(32, Cut(64, 128, group=1, num_warps=4, num_stages=4))
    if rows <= 40:
        return _alike(64, Cut(128, 64, group=4, num_warps=4, num_stages=4))
    # The second product is less deep: two programs at a time hide each other's beginning and end.
    first, second = Cut(256, 64, group=8, num_warps=8, num_stages=4), Cut(128, 64, group=8, num_warps=8, num_stages=3)
    return Tile(128, halves=True, first=first, second=second)


def _alike(rows: int, cut: Cut) -> Tile:
    return Tile(rows, halves=False, first=cut, second=cut)


def max_rows(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> int:
    """How many rows there are at most between and behind the matrix products, padding included."""
    num_pairs = num_tokens * top_k
    rows = tile_for(num_pairs, num_experts, dtype).rows
    return max_blocks(num_pairs, num_experts, rows) * rows


def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The sum over each token's best experts of weight * down(silu(gate(x)) * up(x)).

    The launches depend on shapes alone. What is computed of a token doesn't depend on the other tokens' values.

    Args:
        x: (num_tokens, hidden_size), contiguous; float32, float16 or bfloat16.
        router_logits: (num_tokens, num_experts), any float dtype. Weights are their softmax over all experts.
        gate_up: (num_experts, 2 * width, hidden_size), contiguous, x's dtype. Row 2 * i is the gate's i-th, row
            2 * i + 1 the up projection's.
        down: (num_experts, hidden_size, width), likewise.
        top_k: how many experts a token goes through.
        renormalize: scale each token's weights to a sum of 1.
        out: where to put the result, contiguous.
        tile: None: what `tile_for` says.

    Returns:
        `out`, or a new tensor: x's shape and dtype.
    """
    if not support.runs_kernels(x):
        result = reference_moe.fused_moe(x, router_logits, gate_up, down, top_k, renormalize=renormalize)
        return result if out is None else out.copy_(result)
    out = torch.empty_like(x) if out is None else out
    (num_tokens, hidden_size), (num_experts, _, width) = x.shape, down.shape
    if not num_tokens:
        return out
    tile = tile or tile_for(num_tokens * top_k, num_experts, x.dtype)
    routing = route(router_logits, top_k, renormalize=renormalize, block_rows=tile.rows)
    num_rows = routing.max_blocks * tile.rows
    hidden = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    rows = torch.empty((num_rows, hidden_size), dtype=x.dtype, device=x.device)
    _launch_product(x, gate_up, hidden, routing, tile.first, halves=tile.halves, is_first=True)
    _launch_product(hidden, down, rows, routing, tile.second, halves=tile.halves, is_first=False)
    pdl = support.uses_pdl(x)
    num_blocks = -(-hidden_size // _SUM_BLOCK)
    _sum_kernel[(num_tokens * num_blocks,)](
        rows,
        routing.ids,
        routing.weights,
        routing.ranks,
        routing.starts,
        out,
        size=hidden_size,
        top_k=top_k,
        block_rows=tile.rows,
        block=_SUM_BLOCK,
        num_blocks=num_blocks,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def _launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    routing: Routing,
    cut: Cut,
    *,
    halves: bool,
    is_first: bool,
) -> None:
    _, size_n, size_k = weight.shape
    num_blocks = -(-routing.max_blocks // cut.group) * cut.group
    pdl = support.uses_pdl(x)
    _product_kernel[(num_blocks * -(-size_n // cut.columns),)](
        x,
        weight,
        out,
        routing.members,
        routing.blocks,
        routing.members.stride(0),
        routing.blocks.stride(0),
        size_n=size_n,
        size_k=size_k,
        block_m=routing.block_rows,
        block_n=cut.columns,
        block_k=cut.depth,
        halves=halves,
        group=cut.group,
        is_first=is_first,
        pdl=pdl,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        launch_pdl=pdl,
    )


@jit
def _product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    members: tl.tensor,
    blocks: tl.tensor,
    member_stride: tl.tensor,
    block_stride: tl.tensor,
    size_n: tl.constexpr,
    size_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    halves: tl.constexpr,
    group: tl.constexpr,
    is_first: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per block of rows and tile of columns: out = x @ weight[expert].T, activated if `is_first`."""
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
    members += expert * member_stride + tl.load(blocks + 2 * block_stride + block)
    weight += expert * (size_n * size_k)
    first_row = block.to(tl.int64) * block_m
    if is_first:
        out += first_row * (size_n // 2)
    else:
        out += first_row * size_n
        x += first_row * size_k
    half: tl.constexpr = block_m // 2
    if halves and num_rows <= half:
        _product(x, weight, out, members, num_rows, column, size_n, size_k, half, block_n, block_k, is_first)
    else:
        _product(x, weight, out, members, num_rows, column, size_n, size_k, block_m, block_n, block_k, is_first)


@jit
def _product(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    members: tl.tensor,
    num_rows: tl.tensor,
    column: tl.tensor,
    size_n: tl.constexpr,
    size_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    is_first: tl.constexpr,
) -> None:
    """The first `num_rows` rows of a tile from `column` on. Rows beyond are neither read nor written."""
    rows = tl.arange(0, block_m)
    inside = rows < num_rows
    sources = rows
    if is_first:
        sources = tl.load(members + rows, mask=inside, other=0).to(tl.int64)
    ks = tl.arange(0, block_k)
    x_places = x + sources[:, None] * size_k + ks[None, :]
    columns = column + tl.arange(0, block_n)
    w_columns = columns if size_n % block_n == 0 else columns % size_n
    w_places = weight + w_columns[None, :] * size_k + ks[:, None]
    acc = tl.zeros((block_m, block_n), tl.float32)
    for k in range(0, size_k, block_k):
        if size_k % block_k == 0:
            a = tl.load(x_places, mask=inside[:, None], other=0.0)
            b = tl.load(w_places)
        else:
            a = tl.load(x_places, mask=inside[:, None] & (ks < size_k - k)[None, :], other=0.0)
            b = tl.load(w_places, mask=(ks < size_k - k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x_places += block_k
        w_places += block_k

    width: tl.constexpr = size_n // 2 if is_first else size_n
    if is_first:
        # Neighbours in a row of the result are gate and up: one thread holds both.
        gate, up = tl.split(tl.reshape(acc, (block_m, block_n // 2, 2)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
        columns = column // 2 + tl.arange(0, block_n // 2)
    places = out + rows[:, None] * width + columns[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns < width)[None, :])


@jit
def _sum_kernel(
    rows: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    ranks: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    size: tl.constexpr,
    top_k: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    num_blocks: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per token and block of columns: the weighted sum of the token's rows, best expert first."""
    token = tl.program_id(0) // num_blocks
    columns = tl.program_id(0) % num_blocks * block + tl.arange(0, block)
    inside = columns < size
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((block,), tl.float32)
    for pick in tl.static_range(top_k):
        pair = token * top_k + pick
        row = tl.load(starts + tl.load(ids + pair)) * block_rows + tl.load(ranks + pair)
        acc += tl.load(weights + pair) * tl.load(rows + row.to(tl.int64) * size + columns, mask=inside).to(tl.float32)
    tl.store(out + token.to(tl.int64) * size + columns, acc.to(out.dtype.element_ty), mask=inside)
