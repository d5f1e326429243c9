"""Attention in torch over the paged pool: what CPUs run, and the reference for all other backends.

Row by row, so that nothing is padded, and KV heads are not repeated. Decode rows, where the overhead of a torch call
per row would count most, go through one kernel on a CPU; in a fixed order all tokens do, as decode rows of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_batch.attention.base import AttentionBackend, AttnSpec, BackendSetup
from minisgl_batch.batch import ForwardBatch
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels import reference_attention
from minisgl_kernels.decode_attention import decode_attention


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """An extend row: its query tokens are [q_start, q_end) of the step, its KV is in `pages`, `kv_len` tokens long."""

    q_start: int
    q_end: int
    kv_len: int
    pages: torch.Tensor  # (num_pages,) int32


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    """The decode rows' slots and lengths, (num_decode,) int32 each, and the extend rows."""

    decode_slots: torch.Tensor
    decode_kv_lens: torch.Tensor
    extend_rows: list[ExtendRow]


class TorchAttention(AttentionBackend):
    """See the module's docstring."""

    def __init__(self, pool: MHAKVCache, *, fixed_order: bool = False) -> None:
        self._pool = pool
        self._fixed_order = fixed_order
        self._decode = decode_attention if pool.k(0).device.type == "cpu" else reference_attention.decode_attention

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        host, rows = batch.host, []
        if self._fixed_order:
            q_lens = torch.from_numpy(host.q_lens).to(batch.slots.device)
            batch.attention = TorchMetadata(batch.slots.repeat_interleave(q_lens), batch.positions + 1, [])
            return
        q_end = host.num_decode
        for i in range(host.num_decode, host.num_rows):
            q_start, kv_len = q_end, int(host.kv_lens[i])
            q_end += int(host.q_lens[i])
            pages = batch.page_table[int(host.slots[i]), : -(-kv_len // self._pool.page_size)]
            rows.append(ExtendRow(q_start, q_end, kv_len, pages))
        n = host.num_decode
        batch.attention = TorchMetadata(batch.slots[:n], batch.kv_lens[:n], rows)

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        k_pool, v_pool = self._pool.k(layer), self._pool.v(layer)
        metadata: TorchMetadata = batch.attention
        out = torch.empty_like(q)
        if num_decode := len(metadata.decode_kv_lens):
            out[:num_decode] = self._decode(
                q[:num_decode],
                k_pool,
                v_pool,
                batch.page_table,
                metadata.decode_slots,
                metadata.decode_kv_lens,
                spec.scale,
                spec.window,
                spec.sinks,
            )
        for row in metadata.extend_rows:
            row_k = reference_attention.gather_kv(k_pool, row.pages, row.kv_len)
            row_v = reference_attention.gather_kv(v_pool, row.pages, row.kv_len)
            tokens = slice(row.q_start, row.q_end)
            out[tokens] = reference_attention.attend(q[tokens], row_k, row_v, spec.scale, spec.window, spec.sinks)
        return out


def make(setup: BackendSetup) -> TorchAttention:
    return TorchAttention(setup.pool, fixed_order=setup.fixed_order)
