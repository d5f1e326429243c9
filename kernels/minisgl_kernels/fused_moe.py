"""The experts of a mixture, each applied to the tokens that its router sends there: Triton, or the twin.

The tokens are sorted by expert into blocks of rows (`moe_routing`). Two grouped matrix products follow, a program per
block and tile of columns: the first one's rows are gathered and activated, the second one's stay in the order of the
experts; and a sum that gathers each token's rows. With many rows per expert the products are `grouped_product`'s.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from minisgl_kernels import grouped_product, reference_moe
from minisgl_kernels import triton_support as support
from minisgl_kernels.matmul import keeps_order
from minisgl_kernels.moe_routing import Routing, max_parts, route
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_SUM_BLOCK = 1024  # columns of a program of the sum
_FEW_ROWS = 40  # of an expert: until so many reading weights takes the time, and the tensor cores beyond
_MANY_ROWS = 160  # between 128, where the product in CUDA C++ is slower on an H200, and 256, where it is faster


class ClampedSwiglu(NamedTuple):
    """An activation: gate * sigmoid(alpha * gate) * (up + 1), of gates up to `limit` and ups between both limits."""

    alpha: float
    limit: float


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


def runs_clusters(x: torch.Tensor, num_pairs: int, num_experts: int, width: int) -> bool:
    """Whether the matrix products are `grouped_product`'s: for many rows per expert, on a Hopper GPU.

    Its last bits are others than Triton's, so not where a row mustn't depend on how many there are.
    """
    many = num_pairs > _MANY_ROWS * num_experts and not keeps_order()
    return many and grouped_product.can_run(x, x.shape[1], width)


def max_rows(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> int:
    """How many rows there are at most between and behind the matrix products, padding included."""
    unit = tile_for(num_tokens * top_k, num_experts, dtype).unit
    return max_parts(num_tokens * top_k, num_experts, unit) * unit


def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: ClampedSwiglu | None = None,
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
        gate_up_bias: (num_experts, 2 * width), in the order of `gate_up`, x's dtype, contiguous.
        down_bias: (num_experts, hidden_size), likewise.
        activation: in the place of silu(gate) * up.
        out: where to put the result, contiguous.
        tile: None: what `tile_for` says.

    Returns:
        `out`, or a new tensor: x's shape and dtype.
    """
    if not support.runs_kernels(x):
        result = reference_moe.fused_moe(
            x,
            router_logits,
            gate_up,
            down,
            top_k,
            renormalize=renormalize,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=activation,
        )
        return result if out is None else out.copy_(result)
    out = torch.empty_like(x) if out is None else out
    (num_tokens, hidden_size), (num_experts, _, width) = x.shape, down.shape
    if not num_tokens:
        return out
    if tile is None and runs_clusters(x, num_tokens * top_k, num_experts, width):
        first = second = grouped_product.grouped_product
        unit, units = grouped_product.UNIT, grouped_product.UNITS
    else:
        tile = tile or tile_for(num_tokens * top_k, num_experts, x.dtype)
        first, second = partial(_launch_product, tile, tile.first), partial(_launch_product, tile, tile.second)
        unit, units = tile.unit, tile.units
    routing = route(router_logits, top_k, renormalize=renormalize, unit=unit, units=units)
    hidden = torch.empty((routing.max_rows, width), dtype=x.dtype, device=x.device)
    rows = torch.empty((routing.max_rows, hidden_size), dtype=x.dtype, device=x.device)
    first(x, gate_up, gate_up_bias, hidden, routing, activation, is_first=True)
    second(hidden, down, down_bias, rows, routing, None, is_first=False)
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
        unit=unit,
        block=_SUM_BLOCK,
        num_blocks=num_blocks,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def _launch_product(
    tile: Tile,
    cut: Cut,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    activation: ClampedSwiglu | None,
    *,
    is_first: bool,
) -> None:
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
    if units == 1 or num_rows <= unit:
        _product(
            x,
            weight,
            bias,
            out,
            members,
            num_rows,
            column,
            size_k,
            size_n,
            unit,
            0,
            block_n,
            block_k,
            even,
            is_first,
            alpha,
            limit,
        )
    elif units == 2 or num_rows <= two:
        _product(
            x,
            weight,
            bias,
            out,
            members,
            num_rows,
            column,
            size_k,
            size_n,
            two,
            0,
            block_n,
            block_k,
            even,
            is_first,
            alpha,
            limit,
        )
    else:
        _product(
            x,
            weight,
            bias,
            out,
            members,
            num_rows,
            column,
            size_k,
            size_n,
            two,
            unit,
            block_n,
            block_k,
            even,
            is_first,
            alpha,
            limit,
        )


@jit
def _product(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    members: tl.tensor,
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
    """Add the bias, activate if `is_first` (see `ClampedSwiglu`; `alpha` 0: silu(gate) * up), round and write."""
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
    unit: tl.constexpr,
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
        row = tl.load(starts + tl.load(ids + pair)) * unit + tl.load(ranks + pair)
        acc += tl.load(weights + pair) * tl.load(rows + row.to(tl.int64) * size + columns, mask=inside).to(tl.float32)
    tl.store(out + token.to(tl.int64) * size + columns, acc.to(out.dtype.element_ty), mask=inside)
