"""Attention in plain torch over the paged pool: the reference for all other backends, and what CPUs run.

Row by row, so that nothing is padded; the query heads of a KV head are rows of one matrix, so that KV is not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_batch.attention.base import AttentionBackend, AttnSpec
from minisgl_batch.batch import ForwardBatch
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.reference import store_kv


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """One row of a step: its query tokens [q_start, q_start + q_len), and its KV in `pages`, `kv_len` tokens long."""

    q_start: int
    q_len: int
    kv_len: int
    pages: torch.Tensor  # (num_pages,) int64


class TorchAttention(AttentionBackend):
    """See the module's docstring."""

    def __init__(self, pool: MHAKVCache) -> None:
        self._pool = pool

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        host, rows, q_start = batch.host, [], 0
        tables = batch.page_table[batch.slots.long()].long()
        for i, (q_len, kv_len) in enumerate(zip(host.q_lens.tolist(), host.kv_lens.tolist(), strict=True)):
            pages = tables[i, : -(-kv_len // self._pool.page_size)]
            rows.append(RowMetadata(q_start, q_len, kv_len, pages))
            q_start += q_len
        batch.attention = rows

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        k_pool, v_pool = self._pool.k(layer), self._pool.v(layer)
        store_kv(k, v, k_pool, v_pool, batch.out_loc)
        out = torch.empty_like(q)
        rows: list[RowMetadata] = batch.attention
        for row in rows:
            tokens = slice(row.q_start, row.q_start + row.q_len)
            row_k = k_pool[row.pages].flatten(0, 1)[: row.kv_len]
            row_v = v_pool[row.pages].flatten(0, 1)[: row.kv_len]
            out[tokens] = attend(q[tokens], row_k, row_v, spec)
        return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec) -> torch.Tensor:
    """Causal attention of a sequence's last tokens over the whole sequence.

    Args:
        q: (q_len, num_heads, head_dim), the last q_len tokens.
        k, v: (kv_len, num_kv_heads, head_dim).

    Returns:
        (q_len, num_heads, head_dim).
    """
    q_len, num_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    # (num_kv_heads, group * q_len, head_dim): head h attends with KV head h // group
    queries = q.view(q_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    mask = _mask(q_len, kv_len, spec.window, q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries.unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=None if mask is None else mask.repeat(group, 1),
        scale=spec.scale,
    )
    return out.view(num_kv_heads, group, q_len, head_dim).permute(2, 0, 1, 3).reshape(q_len, num_heads, head_dim)


def _mask(q_len: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(q_len, kv_len) bool, True where a query sees a key; None when it sees all."""
    if q_len == 1 and (window is None or kv_len <= window):
        return None
    distance = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1) - torch.arange(kv_len, device=device)
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
