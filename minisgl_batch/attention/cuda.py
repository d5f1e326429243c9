"""The `fa,cuda` backend: our own kernel for decode rows, flash-attn for extend rows and for shared prefixes.

The kernel finds its work in the page lists on the device, so the host plans nothing for a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_batch.attention.base import AttnHeads, AttnSpec, BackendSetup
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.fa import FlashAttnExtend
from minisgl_batch.attention.hybrid import HybridBackend
from minisgl_batch.attention.parts import OwnPagesPart, PrefixCosts
from minisgl_batch.attention.two_level import TwoLevelDecode
from minisgl_batch.attention.widened import WidenedLayer
from minisgl_batch.batch import IntArray
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.decode_inputs import PageLists
from minisgl_kernels.e4m3 import E4M3
from minisgl_kernels.paged_decode import HEAD_DIMS, MAX_GROUP, TILE, can_run, make_workspace, paged_decode


class Lists(NamedTuple):
    """Page lists in the decode buffers: the rows' own ones, and those of layers with a window."""

    own: PageLists
    window: PageLists | None


class CudaDecode(OwnPagesPart):
    """Attention of decode rows over page lists."""

    def __init__(self, pool: MHAKVCache, heads: AttnHeads, buffers: DecodeBuffers, num_workers: int | None = None):
        """
        Args:
            num_workers: as for `make_workspace`.
        """
        self.prefix_costs = PrefixCosts(per_saved_mib=0.113, per_row=0.09, per_row_and_head=0.0009)
        if pool.dtype == E4M3:
            self.prefix_costs = PrefixCosts(per_saved_mib=0.19, per_row=0.04, per_row_and_head=0.0005)
        self._pool = pool
        self._buffers = buffers
        buffers.need_window_lists()
        self._workspace = make_workspace(
            buffers.max_rows,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            buffers.packed.device,
            num_workers,
        )

    def make_ready(self, num_rows: int) -> None:
        pass

    def prepare(self, num_rows: int, indptr: IntArray, kv_lens: IntArray) -> Lists:
        return Lists(self._buffers.lists(num_rows), self._buffers.window_lists(num_rows))

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Lists) -> torch.Tensor:
        lists = prepared.own if spec.window is None else prepared.window
        assert lists is not None, "the buffers were made for layers without windows"
        return self._attend(q, layer, spec, lists, None)

    def forward_behind(
        self,
        prefix: tuple[torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        layer: int,
        spec: AttnSpec,
        prepared: Lists,
    ) -> torch.Tensor:
        return self._attend(q, layer, spec, prepared.own, prefix)

    def _attend(
        self,
        q: torch.Tensor,
        layer: int,
        spec: AttnSpec,
        lists: PageLists,
        prefix: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        k_pool, v_pool, workspace = self._pool.k(layer), self._pool.v(layer), self._workspace
        return paged_decode(q, k_pool, v_pool, lists, spec.scale, workspace, prefix, spec.window, spec.sinks)


def make(setup: BackendSetup) -> HybridBackend:
    pool, heads = setup.pool, setup.heads
    device = pool.k(0).device
    group = heads.num_heads // heads.num_kv_heads
    if not can_run(device, setup.dtype, group, heads.head_dim, pool.page_size):
        raise InvalidParameterError(
            "attention_backend",
            f"'fa,cuda' needs a Hopper GPU, nvcc, ninja and apache-tvm-ffi; 16-bit floats; heads of "
            f"{' or '.join(map(str, HEAD_DIMS))} dimensions, here {heads.head_dim}; at most {MAX_GROUP} query heads "
            f"per KV head, here {group}; and pages of {TILE} tokens times a power of two, here {pool.page_size}; "
            "'fa,fi' and 'triton' have none of these limits",
        )
    buffers = setup.make_buffers()
    decode = CudaDecode(pool, heads, buffers)
    widened = WidenedLayer(pool, setup.dtype) if pool.dtype == E4M3 else None
    two_level = TwoLevelDecode(pool, heads, decode, buffers, widened)
    return HybridBackend(FlashAttnExtend(pool, widened), decode, two_level, buffers)
