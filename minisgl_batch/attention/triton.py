"""The `triton` backend: our own paged attention, for GPUs where neither flash-attn nor FlashInfer is installed.

Decode and extend rows have a kernel each. Both read the page table itself, so there is nothing to plan, and a graph of
a decode step follows its buffers.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from minisgl_batch.attention.base import AttnSpec, BackendSetup, GraphBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.batch import ForwardBatch, ScheduledBatch, SharingCosts
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.paged_attention import PagedRows, paged_attention

Parts: TypeAlias = list[tuple[slice, PagedRows]]
"""The decode rows and the extend rows, those that the step has, each with its tokens."""


class TritonAttention(GraphBackend):
    """See the module's docstring.

    Args:
        pool: the KV pool.
        buffers: where the decode rows of graphs stand.
    """

    def __init__(self, pool: MHAKVCache, buffers: DecodeBuffers) -> None:
        self._pool = pool
        self._buffers = buffers

    @property
    def sharing_costs(self) -> SharingCosts | None:
        return None

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        batch.attention = _parts(batch)

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        k_pool, v_pool = self._pool.k(layer), self._pool.v(layer)
        outs = [
            paged_attention(q[tokens], k_pool, v_pool, rows, spec.scale, spec.window)[0]
            for tokens, rows in batch.attention or _parts(batch)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def prepare_capture(self, num_rows: int, *, shared: bool) -> None:
        assert not shared
        self._buffers.fill(None, num_rows)

    def prepare_replay(self, batch: ScheduledBatch, num_rows: int) -> None:
        self._buffers.fill(batch, num_rows)


def _parts(batch: ForwardBatch) -> Parts:
    host, table, n = batch.host, batch.page_table, batch.host.num_decode
    parts = [(slice(0, n), PagedRows(table, batch.slots[:n], batch.kv_lens[:n]))] if n else []
    if n < host.num_rows:
        # A decode row is one token, so the extend rows' tokens begin at n.
        starts, max_q_len = batch.q_starts[n:] - n, int(host.q_lens[n:].max())
        rows = PagedRows(table, batch.slots[n:], batch.kv_lens[n:], starts, max_q_len)
        parts.append((slice(n, host.num_tokens), rows))
    return parts


def make(setup: BackendSetup) -> TritonAttention:
    return TritonAttention(setup.pool, setup.make_buffers())
