"""Attention of decode rows whose sequences share a prefix, in two levels (cf. FlashInfer's cascade, Hydragen).

First all rows of a group attend to the group's prefix, which is read once for all of them: flash-attn, without a mask,
groups as sequences. Then each row attends to its own pages: FlashInfer. The two results are merged by their log-sum-
exps. Rows without a group see an empty prefix. Runs inside decode graphs; the groups change through the buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from minisgl_kernels.merge_states import merge_states

from minisgl_batch.attention import flash_attn
from minisgl_batch.attention.base import AttnSpec, DecodeBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.fi import FlashInferBackend
from minisgl_batch.batch import IntArray
from minisgl_batch.kvcache.mha_pool import MHAKVCache


class TwoLevelBackend(DecodeBackend):
    """See the module's docstring."""

    def __init__(self, pool: MHAKVCache, own: FlashInferBackend, buffers: DecodeBuffers) -> None:
        self._pool = pool
        self._own = own
        self._buffers = buffers
        self._attend = flash_attn.load(pool.page_size)

    def prepare_decode(self, num_rows: int, host_indptr: IntArray, host_kv_lens: IntArray) -> Any:
        return self._own.prepare_decode(num_rows, host_indptr, host_kv_lens)

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, metadata: Any) -> torch.Tensor:
        buffers, pages = self._buffers, self._buffers.group_pages
        groups = flash_attn.PagedSequences(
            q_starts=buffers.group_starts,
            kv_lens=buffers.group_lens,
            pages=pages,
            max_q_len=len(q),
            max_kv_len=pages.shape[1] * self._pool.page_size,
        )
        prefix, prefix_lse = self._attend(q, self._pool.k(layer), self._pool.v(layer), groups, spec, False)
        own, own_lse = self._own.forward_with_lse(q, layer, metadata)
        return merge_states(
            prefix, prefix_lse.t(), own, own_lse, lse_a_is_log2=False, lse_b_is_log2=True, out=own
        )
