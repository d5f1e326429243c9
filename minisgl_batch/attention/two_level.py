"""Attention of decode rows whose sequences share a prefix, in two levels (cf. Juravsky et al. 2024, Hydragen).

First all rows of a group attend to the group's prefix, which is read once for all of them: flash-attn without a mask,
the groups as its sequences. Then each row attends to its own pages, and the results are merged by their log-sum-exps.
Rows without a group see an empty prefix. Runs inside decode graphs, since groups change through the buffers alone.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl_batch.attention import flash_attn
from minisgl_batch.attention.base import AttnHeads, AttnSpec
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.parts import OwnPagesPart, PrefixCosts, TwoLevelPart
from minisgl_batch.attention.widened import WidenedLayer
from minisgl_batch.batch import IntArray, SharingCosts
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.e4m3 import E4M3


class TwoLevelDecode(TwoLevelPart):
    """See the module's docstring.

    Args:
        widened: as for `FlashAttnExtend`.
    """

    def __init__(
        self,
        pool: MHAKVCache,
        heads: AttnHeads,
        own: OwnPagesPart,
        buffers: DecodeBuffers,
        widened: WidenedLayer | None = None,
    ) -> None:
        self.costs = _costs(heads, pool, own.prefix_costs, buffers.max_groups)
        self._pool = pool
        self._own = own
        self._buffers = buffers
        self._widened = widened
        self._attend = flash_attn.load(pool.page_size)

    def make_ready(self, num_rows: int) -> None:
        self._own.make_ready(num_rows)

    def prepare(self, num_rows: int, indptr: IntArray, kv_lens: IntArray) -> Any:
        return self._own.prepare(num_rows, indptr, kv_lens)

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Any) -> torch.Tensor:
        if spec.window is not None:  # which mostly lies behind the prefixes
            return self._own.forward(q, layer, spec, prepared)
        groups = flash_attn.PagedSequences(
            q_starts=self._buffers.group_starts,
            kv_lens=self._buffers.group_lens,
            pages=self._buffers.group_pages,
            max_q_len=len(q),
            max_kv_len=self._buffers.group_pages.shape[1] * self._pool.page_size,
        )
        k, v = self._pool.k(layer), self._pool.v(layer)
        if self._widened is not None:
            k, v = self._widened.read(layer, groups.pages.view(-1))  # which ends in zeros, all but one for nothing
        prefix = self._attend(q, k, v, groups, spec, False)
        return self._own.forward_behind(prefix, q, layer, spec, prepared)


def _costs(heads: AttnHeads, pool: MHAKVCache, costs: PrefixCosts, max_groups: int) -> SharingCosts:
    kv_bytes = 2 * heads.num_kv_heads * heads.head_dim * pool.k(0).element_size()
    return SharingCosts(
        per_saved_token=costs.per_saved_mib * kv_bytes / 2**20,
        base=22.0 if pool.dtype == E4M3 else 6.0,  # pages are widened first
        per_row=costs.per_row + costs.per_row_and_head * heads.num_heads,
        per_prefix_token=0.012,
        max_groups=max_groups,
    )
