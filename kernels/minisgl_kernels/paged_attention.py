"""Causal attention over the paged KV pool, for GPUs without a library for it: Triton, or the twin.

Decode rows (one query each) are memory bound: all query heads of a KV head share a program, so that keys and values are
read once, and long rows are split over programs whose partial results a second kernel joins (flash-decoding, Dao et
al. 2023). Extend rows are compute bound: a program takes a tile of one head's queries (FlashAttention 2, Dao 2023).
Over 400 lines since both kernels are launched by one function, for one set of arguments.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch

from minisgl_kernels import reference_attention
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_SPLIT_TOKENS = 128  # a decode program reads no fewer, if the row has them
_MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 4  # decode programs that keep the memory busy


class PrefixStates(NamedTuple):
    """Decode rows' softmax over the whole blocks of a prefix, from which they go on: see `shared_prefix`.

    Attributes:
        num_pages: (num_rows,) int32, of each row's prefix; 0 where it has none.
        acc: (num_rows, num_heads, head_dim) float32, weighted sums of values.
        sums: (2, num_rows, num_heads) float32: highest scores in units of log 2, and sums of weights.
    """

    num_pages: torch.Tensor
    acc: torch.Tensor
    sums: torch.Tensor


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


def fixed_tile(dtype: torch.dtype) -> tuple[int, int]:
    """Queries and warps of a program that adds up in the extend kernel's order: those of its smallest tile."""
    return (32 if dtype == torch.float32 else 64), 4


def block_tokens_of(dtype: torch.dtype, block_dims: int) -> int:
    """Tokens whose keys and values are in shared memory at once: 32 KB of them."""
    return max(16, min(64, 2**14 // (dtype.itemsize * block_dims)))


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@jit
def _load_tokens(
    pool: tl.tensor,
    line: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_dims: tl.constexpr,
) -> Any:
    """One head's keys or values of some tokens, (block_tokens, block_dims); zeros for those from `end` on."""
    inside = tokens < end
    pages = tl.load(line + tokens // page_size, mask=inside, other=0).to(tl.int64)
    places = ((pages * page_size + tokens % page_size) * num_kv_heads + kv_head) * head_dim
    dims = tl.arange(0, block_dims)
    mask = inside[:, None] & (dims < head_dim)[None, :]
    return tl.load(pool + places[:, None] + dims[None, :], mask=mask, other=0.0)


@jit
def _attend(
    state: tl.tuple,
    queries: tl.tensor,
    positions: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    line: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    masked: tl.constexpr,
    window: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_tokens: tl.constexpr,
) -> Any:
    """Take tokens [begin, end) into account, by online softmax (Milakov, Gimelshein 2018).

    Args:
        state: (acc, peak, total): of each query the weighted sum of values, the highest score in units of log 2, and
            the sum of weights relative to it.
        positions: of the queries, which see no later tokens and only `window` tokens back.
        masked: whether some query doesn't see some of the tokens; else their number is a multiple of a block's.
    """
    acc, peak, total = state
    for start in range(begin, end, block_tokens):
        tokens = start + tl.arange(0, block_tokens)
        k = _load_tokens(k_pool, line, tokens, end, kv_head, num_kv_heads, head_dim, page_size, acc.shape[1])
        k = k.to(queries.dtype)  # from e4m3; else it is already
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        if masked:
            distance = positions[:, None] - tokens[None, :]
            visible = (distance >= 0) & (tokens < end)[None, :]
            if window:
                visible &= distance < window
            scores = tl.where(visible, scores, float("-inf"))
        v = _load_tokens(v_pool, line, tokens, end, kv_head, num_kv_heads, head_dim, page_size, acc.shape[1])
        v = v.to(queries.dtype)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query may not have seen any token yet
        weights = tl.exp2(scores - finite_peak[:, None])
        shrink = tl.exp2(peak - finite_peak)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        peak = new_peak
    return acc, peak, total


@jit
def _start(
    sinks: tl.tensor | None, heads: tl.tensor, counts: tl.tensor, num_queries: tl.constexpr, block_dims: tl.constexpr
) -> Any:
    """`_attend`'s state before the first token: as if a sink, where it counts, had been the only key so far."""
    acc = tl.zeros((num_queries, block_dims), tl.float32)
    peak = tl.full((num_queries,), float("-inf"), tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + heads, mask=counts, other=float("-inf")) * 1.4426950408889634
    return acc, peak, tl.where(peak == float("-inf"), 0.0, 1.0)


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

    acc, peak, total = _start(sinks, heads, (members < group) & (split == 0), block_heads, block_dims)
    if prefix_pages is not None:
        places = row * num_heads + heads
        acc = tl.load(prefix_acc + places[:, None] * head_dim + dims[None, :], mask=q_mask & (first > 0), other=0.0)
        mask = (members < group) & (first > 0)
        peak = tl.where(mask, tl.load(prefix_sums + places, mask=mask, other=0.0), peak)
        more = tl.num_programs(2).to(tl.int64) * num_heads + places
        total = tl.where(mask, tl.load(prefix_sums + more, mask=mask, other=0.0), total)
    acc, peak, total = _attend(
        (acc, peak, total),
        queries,
        tl.full((block_heads,), kv_len - 1, tl.int32),
        k_pool,
        v_pool,
        line,
        begin,
        end,
        kv_head,
        scale,
        True,
        window,
        num_kv_heads,
        head_dim,
        page_size,
        block_tokens,
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

        state = _attend(
            _start(sinks, tl.full((block_queries,), head, tl.int32), numbers < q_len, block_queries, block_dims),
            queries,
            positions,
            k_pool,
            v_pool,
            line,
            first,
            common,
            kv_head,
            scale,
            False,
            window,
            num_kv_heads,
            head_dim,
            page_size,
            block_tokens,
        )
        acc, peak, total = _attend(
            state,
            queries,
            positions,
            k_pool,
            v_pool,
            line,
            common,
            end,
            kv_head,
            scale,
            True,
            window,
            num_kv_heads,
            head_dim,
            page_size,
            block_tokens,
        )
        acc = acc / total[:, None]
        tl.store(
            out + (rows * num_heads + head)[:, None] * head_dim + dims[None, :], acc.to(out.dtype.element_ty), q_mask
        )
        tl.store(lse + rows * num_heads + head, (peak + tl.log2(total)) * 0.6931471805599453, numbers < q_len)
