"""The `fa` backend: flash-attn over the paged pool, for rows of any length. Best at prefill; has no graph hooks."""

from __future__ import annotations

import torch

from minisgl_batch.attention import flash_attn
from minisgl_batch.attention.base import AttentionBackend, AttnSpec
from minisgl_batch.batch import ForwardBatch
from minisgl_batch.kvcache.mha_pool import MHAKVCache


class FlashAttentionBackend(AttentionBackend):
    """See the module's docstring."""

    def __init__(self, pool: MHAKVCache) -> None:
        self._pool = pool
        self._attend = flash_attn.load(pool.page_size)

    def prepare_metadata(self, batch: ForwardBatch) -> flash_attn.PagedSequences:
        rows = batch.extend
        assert rows is not None
        max_kv_len = rows.max_kv_len
        pages = batch.page_table[rows.slots.long(), : -(-max_kv_len // self._pool.page_size)]
        return flash_attn.PagedSequences(rows.q_starts, rows.kv_lens, pages, rows.max_q_len, max_kv_len)

    def forward(
        self, q: torch.Tensor, layer: int, spec: AttnSpec, metadata: flash_attn.PagedSequences
    ) -> torch.Tensor:
        return self._attend(q, self._pool.k(layer), self._pool.v(layer), metadata, spec, True)[0]
