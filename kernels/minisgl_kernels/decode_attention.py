"""Attention of decode rows over the paged pool on a CPU: the C++ kernel, or its twin where it can't be built."""

from __future__ import annotations

import ctypes

import torch

from minisgl_kernels import cpp, reference_attention
from minisgl_kernels.e4m3 import E4M3

_DTYPES = (torch.float32, torch.bfloat16)


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row's one query token attends over the row's tokens in the pool, itself included.

    Args:
        q: (num_rows, num_heads, head_dim), each row contiguous.
        k_pool, v_pool: (num_pages, page_size, num_kv_heads, head_dim), contiguous, q's dtype or e4m3.
        page_table: (num_lines, max_pages) int32, contiguous.
        slots: (num_rows,) int32; each row's line of the page table.
        kv_lens: (num_rows,) int32, at least 1.
        scale: factor on q·k.
        window: a query sees this many tokens back (itself included).
        sinks: (num_heads,) float32, each head's score of one more key, whose value is zero.

    Returns:
        (num_rows, num_heads, head_dim), q's dtype, contiguous.
    """
    library = cpp.load("decode_attention_cpu") if q.dtype in _DTYPES else None
    if library is None:
        return reference_attention.decode_attention(q, k_pool, v_pool, page_table, slots, kv_lens, scale, window, sinks)
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_pool.shape
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k_pool, v_pool, out, page_table, slots, kv_lens)]
    library.decode_attention(
        *pointers,
        int(q.dtype == torch.bfloat16),
        int(k_pool.dtype == E4M3),
        num_rows,
        num_kv_heads,
        num_heads // num_kv_heads,
        head_dim,
        page_size,
        ctypes.c_int64(q.stride(0)),
        ctypes.c_int64(page_table.stride(0)),
        ctypes.c_float(scale),
        window or 0,
        ctypes.c_void_p(None if sinks is None else sinks.data_ptr()),
    )
    return out
