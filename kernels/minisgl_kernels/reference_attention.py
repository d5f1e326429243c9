"""The plain twins of the attention kernels: see `reference.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from minisgl_kernels.decode_inputs import PageLists
    from minisgl_kernels.paged_attention import PagedRows


def gather_kv(pool: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """(kv_len, num_kv_heads, head_dim): one row's keys or values, from its pages (int32 or int64) of the pool."""
    num_pages, _, num_kv_heads, head_dim = pool.shape
    # Whole pages as flat rows: one memory copy each.
    held = pool.view(num_pages, -1).index_select(0, pages)
    return held.view(-1, num_kv_heads, head_dim)[:kv_len]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a sequence's last tokens over the whole sequence.

    The query heads of a KV head are rows of one matrix, so that KV is not repeated.

    Args:
        q: (q_len, num_heads, head_dim), the last q_len tokens.
        k, v: (kv_len, num_kv_heads, head_dim), q's dtype or e4m3.
        scale: factor on q·k.
        window: a query sees this many tokens back (itself included).
        sinks: (num_heads,), each head's score of one more key, which all its queries see and whose value is zero.

    Returns:
        (q_len, num_heads, head_dim).
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    mask = _causal_mask(len(q), len(k), window, q.device)
    if sinks is None:
        return _attend(q, k, v, scale, mask)
    # One more dimension, in which queries have the sinks and only the sinks' key has something.
    extra = (sinks / scale).to(q.dtype).view(1, -1, 1).expand(len(q), -1, 1)
    k, v = torch.nn.functional.pad(k, (0, 1, 0, 0, 1, 0)), torch.nn.functional.pad(v, (0, 1, 0, 0, 1, 0))
    k[0, :, -1] = 1.0
    mask = None if mask is None else torch.nn.functional.pad(mask, (1, 0), value=True)
    return _attend(torch.cat((q, extra), dim=-1), k, v, scale, mask)[..., :-1]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    """`attend` for any mask, (q_len, kv_len) bool."""
    q_len, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # (num_kv_heads, group * q_len, head_dim): head h attends with KV head h // group
    queries = q.view(q_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries.unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=None if mask is None else mask.repeat(group, 1),
        scale=scale,
    )
    return out.view(num_kv_heads, group, q_len, head_dim).permute(2, 0, 1, 3).reshape(q_len, num_heads, head_dim)


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
    """The twin of `minisgl_kernels.decode_attention`, row by row."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    page_size = k_pool.shape[1]
    for i, (slot, kv_len) in enumerate(zip(slots.tolist(), kv_lens.tolist(), strict=True)):
        pages = page_table[slot, : -(-kv_len // page_size)]
        k, v = gather_kv(k_pool, pages, kv_len), gather_kv(v_pool, pages, kv_len)
        out[i : i + 1] = attend(q[i : i + 1], k, v, scale, window, sinks)
    return out


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `minisgl_kernels.paged_attention`, row by row. Reads lengths back, so no CUDA graph can hold it."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    q_starts = range(len(q) + 1) if rows.q_starts is None else rows.q_starts.tolist()
    for i, (slot, kv_len) in enumerate(zip(rows.slots.tolist(), rows.kv_lens.tolist(), strict=True)):
        mine = slice(q_starts[i], q_starts[i + 1])
        pages = rows.page_table[slot, : -(-kv_len // k_pool.shape[1])]
        k, v = gather_kv(k_pool, pages, kv_len), gather_kv(v_pool, pages, kv_len)
        out[mine] = attend(q[mine], k, v, scale, window, sinks)
        lse[mine] = _log_sum_exp(q[mine], k, scale, window, sinks)
    return out, lse


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    lists: PageLists,
    scale: float,
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of `minisgl_kernels.paged_decode`."""
    page_size = k_pool.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    starts = lists.indptr.tolist()
    for i, last_page_len in enumerate(lists.last_page_lens.tolist()):
        pages = lists.indices[starts[i] : starts[i + 1]]
        kv_len = (len(pages) - 1) * page_size + last_page_len
        keys, values = gather_kv(k_pool, pages, kv_len), gather_kv(v_pool, pages, kv_len)
        out[i] = attend(q[i : i + 1], keys, values, scale, window, sinks)[0]
        lse[i] = _log_sum_exp(q[i : i + 1], keys, scale, window, sinks)[0]
    if prefix is None:
        return out
    return merge_states(prefix[0], prefix[1].t(), out, lse, lse_a_is_log2=False, lse_b_is_log2=False)


def _log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """(q_len, num_heads) float32: of the scores that `attend` takes the softmax of."""
    queries = q.float().unflatten(1, (k.shape[1], -1))  # (q_len, num_kv_heads, group, head_dim)
    scores = torch.einsum("qkgd,tkd->qkgt", queries, k.float()) * scale
    mask = _causal_mask(len(q), len(k), window, q.device)
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None], -torch.inf)
    lse = scores.logsumexp(dim=-1).flatten(1)
    return lse if sinks is None else torch.logaddexp(lse, sinks)


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    lse_a_is_log2: bool,
    lse_b_is_log2: bool,
) -> torch.Tensor:
    """The twin of `minisgl_kernels.merge_states`."""
    parts = ((out_a, lse_a, lse_a_is_log2), (out_b, lse_b, lse_b_is_log2))
    logs = torch.stack([lse * math.log(2.0) if is_log2 else lse for _, lse, is_log2 in parts])
    logs = logs.masked_fill(logs == torch.inf, -torch.inf)
    # Both parts empty: softmax gives NaN, and the result is zeros.
    weights = logs.softmax(dim=0).nan_to_num(0.0).unsqueeze(-1)
    outs = torch.stack([out_a.float(), out_b.float()])
    return outs.masked_fill(weights == 0.0, 0.0).mul_(weights).sum(dim=0).to(out_a.dtype)


def _causal_mask(q_len: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(q_len, kv_len) bool, True where a query sees a key; None when it sees all."""
    if q_len == 1 and (window is None or kv_len <= window):
        return None
    distance = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1) - torch.arange(kv_len, device=device)
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
