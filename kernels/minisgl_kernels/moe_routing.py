"""Which experts each token goes through, and which tokens each expert gets: Triton, for `fused_moe`.

An expert's tokens stand one after the other as rows. They are counted in units, of which the last may be partly empty,
and cut into blocks of some units, as evenly as it goes. Everything stays on the device, and shapes depend on bounds
alone, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_TOKENS_PER_PROGRAM = 4  # a warp each
_ALIGNMENT = 16  # of lines, so that the kernels that read them are compiled for one case only


class Routing(NamedTuple):
    """A token's j-th expert is `ids[token, j]`, where it is row `starts[id] * unit + ranks[token, j]`.

    Attributes:
        ids: (num_tokens, top_k) int32, best first.
        weights: (num_tokens, top_k) float32.
        ranks: (num_tokens, top_k) int32, the token's number among its expert's, in no particular order.
        counts: (num_experts,) int32, tokens of each expert.
        members: (num_experts, num_tokens or more) int32; the first `counts[i]` of line i are the expert's tokens, by
            rank.
        starts: (num_experts,) int32, each expert's first unit.
        blocks: (4, max_blocks or more) int32: how many tokens each block has, 0 for those that nobody uses; whose it
            is; its first token's rank, and its first row. The number of columns is a multiple of 16.
        num_blocks: (1,) int32.
        max_blocks: how many blocks there may be.
        max_rows: how many rows there may be.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor
    members: torch.Tensor
    starts: torch.Tensor
    blocks: torch.Tensor
    num_blocks: torch.Tensor
    max_blocks: int
    max_rows: int


def max_parts(num_pairs: int, num_experts: int, size: int) -> int:
    """A bound of the parts of `size` rows that so many pairs of token and expert take, however they are spread."""
    return num_pairs // size + min(num_pairs, num_experts)


def route(router_logits: torch.Tensor, top_k: int, *, renormalize: bool, unit: int, units: int) -> Routing:
    """Pick each token's best experts as `reference_moe.route` does, and sort the tokens by expert.

    A NaN counts as the lowest logit.

    Args:
        router_logits: (num_tokens, num_experts) with at least one token, each row contiguous; any float dtype.
        top_k: experts per token.
        renormalize: scale each token's weights to a sum of 1.
        unit: rows of a unit.
        units: of a block, at most.
    """
    (num_tokens, num_experts), device = router_logits.shape, router_logits.device

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    num_pairs = num_tokens * top_k
    max_blocks = max_parts(num_pairs, num_experts, unit * units)
    num_columns = _aligned(max_blocks)
    num_counts = _aligned(num_experts + 2)  # besides those of experts, of programs that have ended and of blocks
    zeros = torch.zeros(num_counts + 4 * num_columns, dtype=torch.int32, device=device)
    routing = Routing(
        ids=numbers(num_tokens, top_k),
        weights=torch.empty((num_tokens, top_k), dtype=torch.float32, device=device),
        ranks=numbers(num_tokens, top_k),
        counts=zeros[:num_experts],
        members=numbers(num_experts, _aligned(num_tokens)),
        starts=numbers(num_experts),
        blocks=zeros[num_counts:].view(4, num_columns),
        num_blocks=zeros[num_experts + 1 : num_experts + 2],
        max_blocks=max_blocks,
        max_rows=max_parts(num_pairs, num_experts, unit) * unit,
    )
    pdl = support.uses_pdl(router_logits)
    _kernel[(-(-num_tokens // _TOKENS_PER_PROGRAM),)](
        router_logits,
        routing.ids,
        routing.weights,
        routing.ranks,
        zeros,
        routing.members,
        routing.starts,
        routing.blocks,
        router_logits.stride(0),
        routing.members.stride(0),
        routing.blocks.stride(0),
        num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        renormalize=renormalize,
        unit=unit,
        units=units,
        block_tokens=_TOKENS_PER_PROGRAM,
        block_experts=support.next_power_of_2(num_experts),
        block_k=support.next_power_of_2(top_k),
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return routing


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@jit
def _kernel(
    logits: tl.tensor,
    ids_out: tl.tensor,
    weights_out: tl.tensor,
    ranks_out: tl.tensor,
    counts: tl.tensor,
    members: tl.tensor,
    starts: tl.tensor,
    blocks: tl.tensor,
    row_stride: tl.tensor,
    member_stride: tl.tensor,
    block_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    renormalize: tl.constexpr,
    unit: tl.constexpr,
    units: tl.constexpr,
    block_tokens: tl.constexpr,
    block_experts: tl.constexpr,
    block_k: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per `block_tokens` tokens; the one that comes last cuts the experts' rows into blocks.

    Ranks come from counting atomically. Behind the experts' counts are that of the programs and that of the blocks.
    """
    tokens = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)[:, None]
    experts = tl.arange(0, block_experts)[None, :]
    picks = tl.arange(0, block_k)[None, :]
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    inside = (tokens < num_tokens) & (experts < num_experts)
    values = tl.load(logits + tokens.to(tl.int64) * row_stride + experts, mask=inside, other=0.0).to(tl.float32)
    lowest: tl.constexpr = -3.0e38  # -inf marks what can't be picked
    values = tl.where(values > lowest, values, lowest)  # a NaN isn't greater
    values = tl.where(experts < num_experts, values, float("-inf"))
    peak = tl.max(values, axis=1, keep_dims=True)
    total = tl.sum(tl.exp(values - peak), axis=1, keep_dims=True)

    ids = tl.zeros((block_tokens, block_k), tl.int32)
    weights = tl.zeros((block_tokens, block_k), tl.float32)
    for pick in tl.static_range(top_k):
        best = tl.max(values, axis=1, keep_dims=True)
        winner = tl.min(tl.where(values == best, experts, block_experts), axis=1, keep_dims=True)
        values = tl.where(experts == winner, float("-inf"), values)
        ids = tl.where(picks == pick, winner, ids)
        weights = tl.where(picks == pick, tl.exp(best - peak), weights)
    if renormalize:
        total = tl.sum(weights, axis=1, keep_dims=True)

    is_pair = (tokens < num_tokens) & (picks < top_k)
    ranks = tl.atomic_add(counts + ids, 1, mask=is_pair, sem="relaxed")
    pairs = tokens * top_k + picks
    tl.store(ids_out + pairs, ids, mask=is_pair)
    tl.store(weights_out + pairs, weights / total, mask=is_pair)
    tl.store(ranks_out + pairs, ranks, mask=is_pair)
    tl.store(members + ids.to(tl.int64) * member_stride + ranks, tl.broadcast_to(tokens, ids.shape), mask=is_pair)

    tl.debug_barrier()  # all threads of this program have counted
    if tl.atomic_add(counts + num_experts, 1) == tl.num_programs(0) - 1:
        _cut(counts, starts, blocks, block_stride, num_experts, unit, units, block_experts)


@jit
def _cut(
    counts: tl.tensor,
    starts: tl.tensor,
    blocks: tl.tensor,
    block_stride: tl.tensor,
    num_experts: tl.constexpr,
    unit: tl.constexpr,
    units: tl.constexpr,
    block_experts: tl.constexpr,
) -> None:
    """Fill `starts` and `blocks`, an expert per lane."""
    experts = tl.arange(0, block_experts)
    count = tl.load(counts + experts, mask=experts < num_experts, other=0, volatile=True)
    num_units = (count + unit - 1) // unit
    num_blocks = (num_units + units - 1) // units
    start = tl.cumsum(num_units, axis=0) - num_units
    tl.store(starts + experts, start, mask=experts < num_experts)
    first_block = tl.cumsum(num_blocks, axis=0) - num_blocks
    tl.store(counts + num_experts + 1, tl.sum(num_blocks, axis=0))
    for i in range(tl.max(num_blocks, axis=0)):
        used = i < num_blocks
        low, high = (i * num_units // tl.maximum(num_blocks, 1), (i + 1) * num_units // tl.maximum(num_blocks, 1))
        place = blocks + first_block + i
        tl.store(place, tl.minimum(count, high * unit) - low * unit, mask=used)
        tl.store(place + block_stride, experts, mask=used)
        tl.store(place + 2 * block_stride, low * unit, mask=used)
        tl.store(place + 3 * block_stride, (start + low) * unit, mask=used)
