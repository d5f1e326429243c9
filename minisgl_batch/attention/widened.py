"""A layer of an e4m3 KV pool in the compute type, for libraries that read no e4m3. Used by the `fa` parts.

There is room for one layer, whose pages stand where they stand in the pool, so that all page lists hold for it too. The
pages that a step reads are written anew for each layer: what a library attends to is what the pool holds.
"""

from __future__ import annotations

import torch

from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.widen_pages import widen_pages


class WidenedLayer:
    """See the module's docstring.

    Args:
        pool: of e4m3.
        dtype: compute type.
    """

    def __init__(self, pool: MHAKVCache, dtype: torch.dtype) -> None:
        self._pool = pool
        # Zeros, as in the pool on a GPU.
        self._k, self._v = torch.zeros((2, *pool.k(0).shape), dtype=dtype, device=pool.k(0).device)

    def read(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, (num_pages + 1, page_size, num_kv_heads, head_dim), until the next call.

        Args:
            pages: (num_entries,) int32; others hold anything. Entries that repeat the one before cost nothing.
        """
        widen_pages(self._pool.k(layer), self._pool.v(layer), pages, self._k, self._v)
        return self._k, self._v
