"""The paged KV pool of standard (multi-head or grouped-query) attention: one tensor for all layers.

Pages have no owner here: which page holds what is the scheduler's business.
"""

from __future__ import annotations

import torch


class MHAKVCache:
    """Keys and values of all layers in pages.

    Attributes:
        num_pages: pages that can be allocated. One more follows them, the dummy page that padding writes to.
        page_size: tokens per page.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # On a GPU zeros: kernels read past a row's last token in its last page and must meet finite numbers there.
        # On a CPU nothing reads there, and memory that is never touched is never committed.
        allocate = torch.empty if device.type == "cpu" else torch.zeros
        shape = (2, num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        pool = allocate(shape, dtype=dtype, device=device)
        self.dtype = dtype
        # Views, made once: eager steps ask for each several times, and the host takes some microseconds to make one.
        self._k, self._v = pool[0].unbind(), pool[1].unbind()

    @property
    def dummy_page(self) -> int:
        return self.num_pages

    def k(self, layer: int) -> torch.Tensor:
        """(num_pages + 1, page_size, num_kv_heads, head_dim)."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """(num_pages + 1, page_size, num_kv_heads, head_dim)."""
        return self._v[layer]

    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
