"""Causal attention over the paged KV pool, for GPUs without a library for it: Triton, or the twin.

Decode rows (one query each) are memory bound: all query heads of a KV head share a program, so that keys and values are
read once, and long rows are split over programs whose partial results a second kernel joins (flash-decoding, Dao et
al. 2023). Extend rows are compute bound: a program takes a tile of one head's queries (FlashAttention 2, Dao 2023).
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from minisgl_kernels import reference_attention
from minisgl_kernels import triton_support as support
from minisgl_kernels.paged_tiles import attend, block_tokens_of, fixed_tile, initial_state
from minisgl_kernels.shared_prefix import PrefixStates
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_SPLIT_TOKENS = 128  # a decode program reads no fewer, if the row has them
_MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 4  # decode programs that keep the memory busy


class PagedRows(NamedTuple):
    """Rows of one call.

    Attributes:
        page_table: (num_lines, max_pages) int32, each line contiguous.
        slots: (num_rows,) int32; each row's line of the page table.
        kv_lens: (num_rows,) int32, at least 1; the row's queries are the last of so many tokens.
        q_starts: (num_rows + 1,) int32; row i has queries [q_starts[i], q_starts[i + 1]). None: one query per row.
        max_q_len: bound of the queries of a row, known to the host.
        prefix: what decode rows have seen already; in a fixed order only, and without a window.
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    q_starts: torch.Tensor | None = None
    max_q_len: int = 1
    prefix: PrefixStates | None = None


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    *,
    fixed_order: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the rows' tokens in the pool; those of the queries are there already.

    Reads nothing behind a row's last token. Without `q_starts` the launches depend on shapes alone.

    Args:
        q: (num_queries, num_heads, head_dim), each query contiguous; float32, float16 or bfloat16.
        k_pool, v_pool: (num_pages, page_size, num_kv_heads, head_dim), contiguous, q's dtype or e4m3.
        rows: which queries and tokens belong together.
        scale: factor on q·k.
        window: a query sees this many tokens back (itself included).
        sinks: (num_heads,) float32, each head's score of one more key, which all queries see and whose value is zero.
        fixed_order: each query gets the same bits whatever other queries and rows there are, and whether it is in a
            call with `q_starts` or without.

    Returns:
        The output, (num_queries, num_heads, head_dim) of q's dtype, and (num_queries, num_heads) float32, the natural
        logarithms of the sums of exponentiated scores, the sinks' included.
    """
    if not support.runs_kernels(q):
        return reference_attention.paged_attention(q, k_pool, v_pool, rows, scale, window, sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if len(q):
        launch = _launch_decode if rows.q_starts is None else _launch_extend
        launch(q, k_pool, v_pool, rows, scale * math.log2(math.e), window or 0, sinks, out, lse, fixed_order)
    return out, lse


def _launch_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    fixed_order: bool,
) -> None:
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_pool.shape
    block_dims = support.next_power_of_2(head_dim)
    max_tokens = rows.page_table.shape[1] * page_size
    num_splits = 1 if fixed_order else _num_splits(num_rows * num_kv_heads, max_tokens, _num_processors(q.device))
    min_heads, num_warps = fixed_tile(q.dtype) if fixed_order else (16, 4)
    prefix_pages, prefix_acc, prefix_sums = rows.prefix or (None, None, None)
    assert rows.prefix is None or (fixed_order and not window)
    partial_out, partial_lse = out, lse
    if num_splits > 1:
        shape = (num_splits, num_rows, num_heads)
        partial_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    pdl = support.uses_pdl(q)
    _decode_kernel[(num_kv_heads, num_splits, num_rows)](
        q,
        k_pool,
        v_pool,
        rows.page_table,
        rows.slots,
        rows.kv_lens,
        sinks,
        prefix_pages,
        prefix_acc,
        prefix_sums,
        partial_out,
        partial_lse,
        q.stride(0),
        rows.page_table.stride(0),
        scale,
        window=window,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block_heads=max(min_heads, support.next_power_of_2(num_heads // num_kv_heads)),
        block_dims=block_dims,
        block_tokens=block_tokens_of(q.dtype, block_dims),
        pdl=pdl,
        num_warps=num_warps,
        num_stages=3,
        launch_pdl=pdl,
        enable_fp_fusion=not fixed_order,
    )
    if num_splits > 1:
        _join_kernel[(num_heads, num_rows)](
            partial_out,
            partial_lse,
            out,
            lse,
            head_dim=head_dim,
            num_splits=num_splits,
            block_dims=block_dims,
            pdl=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )


def _launch_extend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    fixed_order: bool,
) -> None:
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_pool.shape
    block_dims = support.next_power_of_2(head_dim)
    block_queries = 32 if q.dtype == torch.float32 else 64 if rows.max_q_len <= 64 or block_dims > 128 else 128
    _extend_kernel[(-(-rows.max_q_len // block_queries), num_heads, len(rows.slots))](
        q,
        k_pool,
        v_pool,
        rows.page_table,
        rows.slots,
        rows.kv_lens,
        rows.q_starts,
        sinks,
        out,
        lse,
        q.stride(0),
        rows.page_table.stride(0),
        scale,
        window=window,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        block_queries=block_queries,
        block_dims=block_dims,
        block_tokens=block_tokens_of(q.dtype, block_dims),
        num_warps=max(4, block_queries // 16),
        num_stages=3,
        enable_fp_fusion=not fixed_order,
    )


def _num_splits(num_tiles: int, max_tokens: int, num_processors: int) -> int:
    """Programs per row and KV head: enough to keep a GPU busy, a power of two so that few variants are compiled."""
    wanted = min(_PROGRAMS_PER_PROCESSOR * num_processors // num_tiles, max_tokens // _SPLIT_TOKENS, _MAX_SPLITS)
    return 1 << max(1, wanted).bit_length() - 1


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@jit
def _decode_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    page_table: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    sinks: tl.tensor | None,
    prefix_pages: tl.tensor | None,
    prefix_acc: tl.tensor | None,
    prefix_sums: tl.tensor | None,
    out: tl.tensor,
    lse: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_heads: tl.constexpr,
    block_dims: tl.constexpr,
    block_tokens: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row, KV head and split; splits share the row's tokens evenly, in whole blocks."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    line = page_table + tl.load(slots + row).to(tl.int64) * table_stride
    kv_len = tl.load(kv_lens + row)
    # In whole blocks from the row's beginning, so that a token's neighbours in a block are always the same.
    first = tl.maximum(kv_len - window, 0) // block_tokens * block_tokens if window else 0
    if prefix_pages is not None:
        first = tl.load(prefix_pages + row) * page_size // block_tokens * block_tokens
    split_tokens = tl.cdiv(tl.cdiv(kv_len - first, tl.num_programs(1)), block_tokens) * block_tokens
    begin = first + split * split_tokens
    end = tl.minimum(begin + split_tokens, kv_len)

    group: tl.constexpr = num_heads // num_kv_heads
    members = tl.arange(0, block_heads)
    heads = kv_head * group + members
    dims = tl.arange(0, block_dims)
    q_mask = (members < group)[:, None] & (dims < head_dim)[None, :]
    row = row.to(tl.int64)
    queries = tl.load(q + row * q_stride + heads[:, None] * head_dim + dims[None, :], mask=q_mask, other=0.0)

    acc, peak, total = initial_state(sinks, heads, (members < group) & (split == 0), block_heads, block_dims)
    if prefix_pages is not None:
        places = row * num_heads + heads
        acc = tl.load(prefix_acc + places[:, None] * head_dim + dims[None, :], mask=q_mask & (first > 0), other=0.0)
        mask = (members < group) & (first > 0)
        peak = tl.where(mask, tl.load(prefix_sums + places, mask=mask, other=0.0), peak)
        more = tl.num_programs(2).to(tl.int64) * num_heads + places
        total = tl.where(mask, tl.load(prefix_sums + more, mask=mask, other=0.0), total)
    kv, page_shape = (k_pool, v_pool, line, kv_head), (page_size, num_kv_heads, head_dim)
    positions = tl.full((block_heads,), kv_len - 1, tl.int32)
    acc, peak, total = attend(
        (acc, peak, total), queries, positions, kv, begin, end, scale, page_shape, block_tokens, window, masked=True
    )
    place = (split.to(tl.int64) * tl.num_programs(2) + row) * num_heads + heads
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * head_dim + dims[None, :], acc.to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + place, (peak + tl.log2(total)) * 0.6931471805599453, mask=members < group)


@jit
def _join_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    head_dim: tl.constexpr,
    num_splits: tl.constexpr,
    block_dims: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row and head."""
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    places = tl.arange(0, num_splits) * tl.num_programs(0).to(tl.int64) * tl.num_programs(1) + place
    dims = tl.arange(0, block_dims)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    logs = tl.load(partial_lse + places)  # -inf for splits without tokens, finite for the first one
    peak = tl.max(logs, axis=0)
    weights = tl.exp2((logs - peak) * 1.4426950408889634)
    total = tl.sum(weights, axis=0)
    parts = tl.load(
        partial_out + places[:, None] * head_dim + dims[None, :], mask=(dims < head_dim)[None, :], other=0.0
    )
    joined = tl.sum(parts * (weights / total)[:, None], axis=0)
    tl.store(out + place * head_dim + dims, joined.to(out.dtype.element_ty), mask=dims < head_dim)
    tl.store(lse + place, peak + tl.log(total))


@jit
def _extend_kernel(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    page_table: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    q_starts: tl.tensor,
    sinks: tl.tensor | None,
    out: tl.tensor,
    lse: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_queries: tl.constexpr,
    block_dims: tl.constexpr,
    block_tokens: tl.constexpr,
) -> None:
    """One program per row, head and tile of queries; the last tiles, which see the most tokens, start first."""
    tile, head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_start = tl.load(q_starts + row)
    q_len = tl.load(q_starts + row + 1) - q_start
    if tile * block_queries < q_len:
        line = page_table + tl.load(slots + row).to(tl.int64) * table_stride
        kv_len = tl.load(kv_lens + row)
        kv_head = head // (num_heads // num_kv_heads)
        numbers = tile * block_queries + tl.arange(0, block_queries)
        dims = tl.arange(0, block_dims)
        q_mask = (numbers < q_len)[:, None] & (dims < head_dim)[None, :]
        rows = (q_start + numbers).to(tl.int64)
        queries = tl.load(q + rows[:, None] * q_stride + (head * head_dim + dims)[None, :], mask=q_mask, other=0.0)

        # Every query of the tile sees tokens [first, common), and none sees those from `end` on.
        first_position = kv_len - q_len + tile * block_queries
        positions = first_position + tl.arange(0, block_queries)
        end = tl.minimum(first_position + block_queries, kv_len)
        first, common = 0, (first_position + 1) // block_tokens * block_tokens
        if window:
            first = tl.maximum(first_position + 1 - window, 0) // block_tokens * block_tokens
            common = first

        kv, page_shape = (k_pool, v_pool, line, kv_head), (page_size, num_kv_heads, head_dim)
        heads = tl.full((block_queries,), head, tl.int32)
        state = initial_state(sinks, heads, numbers < q_len, block_queries, block_dims)
        state = attend(
            state, queries, positions, kv, first, common, scale, page_shape, block_tokens, window, masked=False
        )
        acc, peak, total = attend(
            state, queries, positions, kv, common, end, scale, page_shape, block_tokens, window, masked=True
        )
        acc = acc / total[:, None]
        tl.store(
            out + (rows * num_heads + head)[:, None] * head_dim + dims[None, :], acc.to(out.dtype.element_ty), q_mask
        )
        tl.store(lse + rows * num_heads + head, (peak + tl.log2(total)) * 0.6931471805599453, numbers < q_len)
