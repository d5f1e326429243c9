"""The `fa` backend: flash-attn over the paged pool. A half of hybrid backends, or all of a step without graphs."""

from __future__ import annotations

import torch

from minisgl_batch.attention import flash_attn
from minisgl_batch.attention.base import AttentionBackend, AttnSpec, BackendSetup
from minisgl_batch.attention.parts import ExtendPart
from minisgl_batch.batch import ForwardBatch
from minisgl_batch.kvcache.mha_pool import MHAKVCache


class FlashAttnBackend(AttentionBackend):
    """Decode rows are sequences with one query, like any other."""

    def __init__(self, pool: MHAKVCache) -> None:
        self._rows = FlashAttnExtend(pool)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        batch.attention = self._rows.sequences(batch, 0)

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        return self._rows.forward(q, layer, spec, batch.attention)


class FlashAttnExtend(ExtendPart):
    """The half for extend rows."""

    def __init__(self, pool: MHAKVCache) -> None:
        self._pool = pool
        self._attend = flash_attn.load(pool.page_size)

    def prepare(self, batch: ForwardBatch) -> flash_attn.PagedSequences:
        return self.sequences(batch, batch.host.num_decode)

    def sequences(self, batch: ForwardBatch, first: int) -> flash_attn.PagedSequences:
        """The rows from `first` on, whose tokens are counted from the first of them."""
        host = batch.host
        max_kv_len = int(host.kv_lens[first:].max())
        num_pages = -(-max_kv_len // self._pool.page_size)
        return flash_attn.PagedSequences(
            q_starts=batch.q_starts[first:] - first,
            kv_lens=batch.kv_lens[first:],
            pages=batch.page_table[batch.slots[first:].long(), :num_pages],
            max_q_len=int(host.q_lens[first:].max()),
            max_kv_len=max_kv_len,
        )

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: flash_attn.PagedSequences) -> torch.Tensor:
        return self._attend(q, self._pool.k(layer), self._pool.v(layer), prepared, spec, True)[0]


def make(setup: BackendSetup) -> FlashAttnBackend:
    return FlashAttnBackend(setup.pool)
