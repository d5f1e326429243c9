"""The `fa,cuda` backend: our own kernel for decode rows, flash-attn for extend rows and for shared prefixes.

The kernel finds its work in the page lists on the device, so the host plans nothing for a step.
"""

from __future__ import annotations

import torch

from minisgl_batch.attention.base import AttnHeads, AttnSpec, BackendSetup
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.fa import FlashAttnExtend
from minisgl_batch.attention.hybrid import HybridBackend
from minisgl_batch.attention.parts import OwnPagesPart, PrefixCosts
from minisgl_batch.attention.two_level import TwoLevelDecode
from minisgl_batch.batch import IntArray
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.decode_inputs import PageLists
from minisgl_kernels.paged_decode import HEAD_DIMS, MAX_GROUP, TILE, can_run, make_workspace, paged_decode


class CudaDecode(OwnPagesPart):
    """Attention of decode rows over their own page lists. `prepared` is those lists, in the decode buffers."""

    prefix_costs = PrefixCosts(per_saved_mib=0.113, per_row=0.09, per_row_and_head=0.0009)

    def __init__(self, pool: MHAKVCache, heads: AttnHeads, buffers: DecodeBuffers, num_workers: int | None = None):
        """
        Args:
            num_workers: as for `make_workspace`.
        """
        self._pool = pool
        self._buffers = buffers
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

    def prepare(self, num_rows: int, indptr: IntArray, kv_lens: IntArray) -> PageLists:
        buffers = self._buffers
        return PageLists(
            buffers.indptr[: num_rows + 1],
            buffers.first_pages[:num_rows],
            buffers.pages,
            buffers.last_page_lens[:num_rows],
        )

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: PageLists) -> torch.Tensor:
        return paged_decode(q, self._pool.k(layer), self._pool.v(layer), prepared, spec.scale, self._workspace)

    def forward_behind(
        self,
        prefix: tuple[torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        layer: int,
        spec: AttnSpec,
        prepared: PageLists,
    ) -> torch.Tensor:
        return paged_decode(q, self._pool.k(layer), self._pool.v(layer), prepared, spec.scale, self._workspace, prefix)


def make(setup: BackendSetup) -> HybridBackend:
    pool, heads = setup.pool, setup.heads
    keys = pool.k(0)
    group = heads.num_heads // heads.num_kv_heads
    if not can_run(keys.device, keys.dtype, group, heads.head_dim, pool.page_size):
        raise InvalidParameterError(
            "attention_backend",
            f"'fa,cuda' needs a Hopper GPU, nvcc, ninja and apache-tvm-ffi; 16-bit floats; heads of "
            f"{' or '.join(map(str, HEAD_DIMS))} dimensions, here {heads.head_dim}; at most {MAX_GROUP} query heads "
            f"per KV head, here {group}; and pages of {TILE} tokens times a power of two, here {pool.page_size}; "
            "'fa,fi' and 'triton' have none of these limits",
        )
    buffers = setup.make_buffers()
    decode = CudaDecode(pool, heads, buffers)
    return HybridBackend(FlashAttnExtend(pool), decode, TwoLevelDecode(pool, heads, decode, buffers), buffers)
