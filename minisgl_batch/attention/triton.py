"""The `triton` backend: our own paged attention, for GPUs where neither flash-attn nor FlashInfer is installed.

Decode and extend rows have a kernel each. Both read the page table itself, so there is nothing to plan, and a graph of
a decode step follows its buffers. In a fixed order, shared prefixes are read once for all rows.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from minisgl_batch.attention.base import AttnHeads, AttnSpec, BackendSetup, GraphBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.batch import ForwardBatch, ScheduledBatch, SharingCosts
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.paged_attention import PagedRows, paged_attention
from minisgl_kernels.shared_prefix import PrefixGroups, attend_to_prefixes

Parts: TypeAlias = list[tuple[slice, PagedRows]]
"""The decode rows and the extend rows, those that the step has, each with its tokens."""


class TritonMetadata(NamedTuple):
    """A step's parts, None for those of a graph, which are the batch's; and its groups with shared prefixes, if any."""

    parts: Parts | None
    groups: PrefixGroups | None


class TritonAttention(GraphBackend):
    """See the module's docstring.

    Args:
        pool: the KV pool.
        heads: the model's heads.
        buffers: where the decode rows of graphs stand.
        fixed_order: as for `BackendSetup`.
    """

    def __init__(self, pool: MHAKVCache, heads: AttnHeads, buffers: DecodeBuffers, *, fixed_order: bool) -> None:
        self._pool = pool
        self._buffers = buffers
        self._fixed_order = fixed_order
        self._costs = _costs(pool, heads, buffers.max_groups)

    @property
    def sharing_costs(self) -> SharingCosts | None:
        return self._costs if self._fixed_order else None

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        batch.attention = TritonMetadata(_parts(batch), None)  # decode rows read all of their own pages

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        k_pool, v_pool = self._pool.k(layer), self._pool.v(layer)
        metadata: TritonMetadata = batch.attention
        values, groups = (spec.scale, spec.window, spec.sinks), metadata.groups
        outs = []
        for tokens, rows in metadata.parts or _parts(batch):
            prefix = None
            if groups is not None and spec.window is None:
                prefix = attend_to_prefixes(q, k_pool, v_pool, groups, spec.scale, spec.sinks)
            rows_behind = rows._replace(prefix=prefix)
            fixed = self._fixed_order
            outs.append(paged_attention(q[tokens], k_pool, v_pool, rows_behind, *values, fixed_order=fixed)[0])
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def prepare_capture(self, num_rows: int, *, shared: bool) -> TritonMetadata:
        buffers = self._buffers
        buffers.fill(None, num_rows)
        if not shared:
            return TritonMetadata(None, None)
        first_pages = buffers.first_pages[:num_rows]
        groups = PrefixGroups(buffers.group_starts, buffers.group_lens, buffers.group_pages, first_pages)
        return TritonMetadata(None, groups)

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


def _costs(pool: MHAKVCache, heads: AttnHeads, max_groups: int) -> SharingCosts:
    kv_bytes = 2 * heads.num_kv_heads * heads.head_dim * pool.k(0).element_size()
    return SharingCosts(
        per_saved_token=0.113 * kv_bytes / 2**20,
        base=6.0,
        per_row=0.02 + 0.001 * heads.num_heads,
        per_prefix_token=0.02,
        max_groups=max_groups,
    )


def make(setup: BackendSetup) -> TritonAttention:
    return TritonAttention(setup.pool, setup.heads, setup.make_buffers(), fixed_order=setup.fixed_order)
