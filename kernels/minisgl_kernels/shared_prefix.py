"""Attention of decode rows to the prefix that their group shares, which is read once for all of them: Triton.

What a row's softmax has come to by the prefix's end is kept in float32, and `paged_attention` goes on from there: the
row gets the very bits that it gets when it reads the prefix by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from minisgl_kernels import triton_support as support
from minisgl_kernels.paged_tiles import attend, block_tokens_of, fixed_tile, initial_state
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl


class PrefixGroups(NamedTuple):
    """Groups of decode rows that stand one after the other.

    Attributes:
        starts: (num_groups + 1,) int32, each group's first row; rows before and behind them belong to none.
        lens: (num_groups,) int32, tokens of each group's prefix, whole pages; 0 where there is none.
        pages: (num_groups, max_pages) int32, each line contiguous.
        first_pages: (num_rows,) int32, pages of the prefix of each row's group.
    """

    starts: torch.Tensor
    lens: torch.Tensor
    pages: torch.Tensor
    first_pages: torch.Tensor


class PrefixStates(NamedTuple):
    """Decode rows' softmax over the whole blocks of a prefix, from which `paged_attention` goes on.

    Attributes:
        num_pages: (num_rows,) int32, of each row's prefix; 0 where it has none.
        acc: (num_rows, num_heads, head_dim) float32, weighted sums of values.
        sums: (2, num_rows, num_heads) float32: highest scores in units of log 2, and sums of weights.
    """

    num_pages: torch.Tensor
    acc: torch.Tensor
    sums: torch.Tensor


def attend_to_prefixes(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    groups: PrefixGroups,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> PrefixStates:
    """Attend to the whole blocks of the groups' prefixes. The launch depends on shapes alone. Arguments as for
    `paged_attention`; each row is one query.
    """
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_pool.shape
    states = PrefixStates(
        groups.first_pages,
        torch.empty((num_rows, num_heads, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((2, num_rows, num_heads), dtype=torch.float32, device=q.device),
    )
    block_queries, num_warps = fixed_tile(q.dtype)
    num_tiles = -(-num_rows * (num_heads // num_kv_heads) // block_queries)
    block_dims = support.next_power_of_2(head_dim)
    pdl = support.uses_pdl(q)
    _kernel[(num_tiles, num_kv_heads, len(groups.lens))](
        q,
        k_pool,
        v_pool,
        groups.starts,
        groups.lens,
        groups.pages,
        sinks,
        states.acc,
        states.sums,
        q.stride(0),
        groups.pages.stride(0),
        num_rows,
        scale * math.log2(math.e),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block_queries=block_queries,
        block_dims=block_dims,
        block_tokens=block_tokens_of(q.dtype, block_dims),
        pdl=pdl,
        num_warps=num_warps,
        num_stages=3,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return states


@jit
def _kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    starts: tl.tensor,
    lens: tl.tensor,
    pages: tl.tensor,
    sinks: tl.tensor | None,
    acc_out: tl.tensor,
    sums_out: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_queries: tl.constexpr,
    block_dims: tl.constexpr,
    block_tokens: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per group, KV head and tile of the queries that its rows have for it."""
    tile, kv_head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    group: tl.constexpr = num_heads // num_kv_heads
    first_row = tl.load(starts + number)
    num_queries = (tl.load(starts + number + 1) - first_row) * group
    end = tl.load(lens + number) // block_tokens * block_tokens
    if (end > 0) & (tile * block_queries < num_queries):
        numbers = tile * block_queries + tl.arange(0, block_queries)
        inside = numbers < num_queries
        rows, heads = (first_row + numbers // group).to(tl.int64), kv_head * group + numbers % group
        dims = tl.arange(0, block_dims)
        mask = inside[:, None] & (dims < head_dim)[None, :]
        queries = tl.load(
            q + rows[:, None] * q_stride + heads[:, None] * head_dim + dims[None, :], mask=mask, other=0.0
        )
        state = initial_state(sinks, heads, inside, block_queries, block_dims)
        positions = tl.zeros((block_queries,), tl.int32)  # of no account where nothing is masked
        kv = (k_pool, v_pool, pages + number.to(tl.int64) * table_stride, kv_head)
        page_shape = (page_size, num_kv_heads, head_dim)
        acc, peak, total = attend(
            state, queries, positions, kv, 0, end, scale, page_shape, block_tokens, window=0, masked=False
        )
        place = rows * num_heads + heads
        tl.store(acc_out + place[:, None] * head_dim + dims[None, :], acc, mask=mask)
        tl.store(sums_out + place, peak, mask=inside)
        tl.store(sums_out + num_rows.to(tl.int64) * num_heads + place, total, mask=inside)
