"""The experts of a mixture, each applied to the tokens that its router sends there: Triton, or the twin.

The tokens are sorted by expert into blocks of rows (`moe_routing`). Two grouped matrix products follow (`moe_tiles`, or
`grouped_product` with many rows per expert): the first one's rows are gathered and activated, the second one's stay in
the order of the experts; and a sum that gathers each token's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from minisgl_kernels import grouped_product, reference_moe
from minisgl_kernels import triton_support as support
from minisgl_kernels.matmul import keeps_order
from minisgl_kernels.moe_routing import Routing, max_parts, route
from minisgl_kernels.moe_tiles import Tile, moe_tiles, tile_for
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_SUM_BLOCK = 1024  # columns of a program of the sum
_MANY_ROWS = 160  # between 128, where the product in CUDA C++ is slower on an H200, and 256, where it is faster


class ClampedSwiglu(NamedTuple):
    """An activation: gate * sigmoid(alpha * gate) * (up + 1), of gates up to `limit` and ups between both limits."""

    alpha: float
    limit: float


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
    product: Callable[..., None]
    if tile is None and runs_clusters(x, num_tokens * top_k, num_experts, width):
        product, unit, units = grouped_product.grouped_product, grouped_product.UNIT, grouped_product.UNITS
    else:
        tile = tile or tile_for(num_tokens * top_k, num_experts, x.dtype)
        product, unit, units = partial(moe_tiles, tile=tile), tile.unit, tile.units
    routing = route(router_logits, top_k, renormalize=renormalize, unit=unit, units=units)
    hidden = torch.empty((routing.max_rows, width), dtype=x.dtype, device=x.device)
    rows = torch.empty((routing.max_rows, hidden_size), dtype=x.dtype, device=x.device)
    product(x, gate_up, gate_up_bias, hidden, routing, activation, is_first=True)
    product(hidden, down, down_bias, rows, routing, None, is_first=False)
    _launch_sum(rows, routing, out, unit)
    return out


def _launch_sum(rows: torch.Tensor, routing: Routing, out: torch.Tensor, unit: int) -> None:
    num_tokens, size = out.shape
    num_blocks = -(-size // _SUM_BLOCK)
    pdl = support.uses_pdl(out)
    _sum_kernel[(num_tokens * num_blocks,)](
        rows,
        routing.ids,
        routing.weights,
        routing.ranks,
        routing.starts,
        out,
        size=size,
        top_k=routing.ids.shape[1],
        unit=unit,
        block=_SUM_BLOCK,
        num_blocks=num_blocks,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


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
