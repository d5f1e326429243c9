"""Attention of a tile of queries to a row's pages, a block of tokens at a time: what the Triton kernels for it share.

Knows nothing of which queries make up a tile. Called by `paged_attention` and `shared_prefix`.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl_kernels.triton_support import jit, tl


def fixed_tile(dtype: torch.dtype) -> tuple[int, int]:
    """Queries and warps of a program that adds up in the extend kernel's order: those of its smallest tile."""
    return (32 if dtype == torch.float32 else 64), 4


def block_tokens_of(dtype: torch.dtype, block_dims: int) -> int:
    """Tokens whose keys and values are in shared memory at once: 32 KB of them."""
    return max(16, min(64, 2**14 // (dtype.itemsize * block_dims)))


@jit
def initial_state(
    sinks: tl.tensor | None, heads: tl.tensor, counts: tl.tensor, num_queries: tl.constexpr, block_dims: tl.constexpr
) -> Any:
    """`attend`'s state before the first token: as if a sink, where it counts, had been the only key so far."""
    acc = tl.zeros((num_queries, block_dims), tl.float32)
    peak = tl.full((num_queries,), float("-inf"), tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + heads, mask=counts, other=float("-inf")) * 1.4426950408889634
    return acc, peak, tl.where(peak == float("-inf"), 0.0, 1.0)


@jit
def attend(
    state: tl.tuple,
    queries: tl.tensor,
    positions: tl.tensor,
    kv: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    page_shape: tl.tuple,
    block_tokens: tl.constexpr,
    window: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """Take tokens [begin, end) into account, by online softmax (Milakov, Gimelshein 2018).

    Args:
        state: (acc, peak, total): of each query the weighted sum of values, the highest score in units of log 2, and
            the sum of weights relative to it.
        queries: (num_queries, block_dims), of one or more heads of a KV head.
        positions: of the queries, which see no later tokens and only `window` tokens back.
        kv: where keys and values are: both pools, the row's line of the page table, and the KV head.
        page_shape: (page_size, num_kv_heads, head_dim), known to the compiler.
        masked: whether some query doesn't see some of the tokens; else their number is a multiple of a block's.
    """
    acc, peak, total = state
    k_pool, v_pool, line, kv_head = kv
    for start in range(begin, end, block_tokens):
        tokens = start + tl.arange(0, block_tokens)
        k = _load_tokens(k_pool, line, tokens, end, kv_head, page_shape, acc.shape[1])
        k = k.to(queries.dtype)  # from e4m3; else it is already
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        if masked:
            distance = positions[:, None] - tokens[None, :]
            visible = (distance >= 0) & (tokens < end)[None, :]
            if window:
                visible &= distance < window
            scores = tl.where(visible, scores, float("-inf"))
        v = _load_tokens(v_pool, line, tokens, end, kv_head, page_shape, acc.shape[1])
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
def _load_tokens(
    pool: tl.tensor,
    line: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    page_shape: tl.tuple,
    block_dims: tl.constexpr,
) -> Any:
    """One head's keys or values of some tokens, (block_tokens, block_dims); zeros for those from `end` on."""
    page_size, num_kv_heads, head_dim = page_shape
    inside = tokens < end
    pages = tl.load(line + tokens // page_size, mask=inside, other=0).to(tl.int64)
    places = ((pages * page_size + tokens % page_size) * num_kv_heads + kv_head) * head_dim
    dims = tl.arange(0, block_dims)
    mask = inside[:, None] & (dims < head_dim)[None, :]
    return tl.load(pool + places[:, None] + dims[None, :], mask=mask, other=0.0)
