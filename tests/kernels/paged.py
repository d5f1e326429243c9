"""Random rows for the paged attention kernels' tests and benchmarks, and how results are compared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from minisgl_kernels import reference_attention
from minisgl_kernels.paged_attention import PagedRows, paged_attention
from tests.kernels.errors import relative_error


@dataclass
class Case:
    """Rows with random lengths and pages; whatever no row may read is NaN."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    rows: PagedRows

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        return paged_attention(q, self.k_pool, self.v_pool, self.rows, q.shape[2] ** -0.5)[0]

    def check(self, window: int | None = None, *, with_sinks: bool = False) -> None:
        """Output and LSE against the twin in float32, near the error of the twin in the same type."""
        scale = self.q.shape[2] ** -0.5
        sinks = 2.0 * torch.randn(self.q.shape[1], device=self.q.device) if with_sinks else None
        wide = (self.q.float(), self.k_pool.float(), self.v_pool.float())
        want, want_lse = reference_attention.paged_attention(*wide, self.rows, scale, window, sinks)
        twin, _ = reference_attention.paged_attention(self.q, self.k_pool, self.v_pool, self.rows, scale, window, sinks)
        got, lse = paged_attention(self.q, self.k_pool, self.v_pool, self.rows, scale, window, sinks)
        assert got.dtype == self.q.dtype
        assert got.is_contiguous()
        assert relative_error(got, want) < {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[got.dtype]
        assert relative_error(got, want) < 2 * relative_error(twin, want) + 2e-6
        torch.testing.assert_close(lse, want_lse, atol=2e-3 if got.dtype != torch.float32 else 1e-4, rtol=1e-4)


def random_case(
    device: torch.device,
    kv_lens: list[int],
    q_lens: list[int] | None,
    *,
    group: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    num_kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    spare_pages: int = 3,
) -> Case:
    num_rows, max_pages = len(kv_lens), max(-(-n // page_size) for n in kv_lens) + spare_pages
    num_pages = num_rows * max_pages
    pools = torch.full((2, num_pages + 1, page_size, num_kv_heads, head_dim), float("nan"), device=device)
    page_table = torch.full((num_rows + 2, max_pages), num_pages, dtype=torch.int32)  # a page of nothing but NaN
    slots = torch.randperm(num_rows + 2)[:num_rows].int()
    free = torch.randperm(num_pages).int()
    for slot, kv_len in zip(slots.tolist(), kv_lens, strict=True):
        used, free = free.split([-(-kv_len // page_size), len(free) - -(-kv_len // page_size)])
        page_table[slot, : len(used)] = used
        places = (used.long().unsqueeze(1) * page_size + torch.arange(page_size)).flatten()[:kv_len].to(device)
        values = torch.randn(2, kv_len, num_kv_heads, head_dim, device=device)
        pools.flatten(1, 2)[:, places] = values
    num_queries = num_rows if q_lens is None else sum(q_lens)
    # A view, as of projections that give queries, keys and values at once.
    q = torch.randn(num_queries, (group + 2) * num_kv_heads, head_dim, device=device)[:, : group * num_kv_heads]
    starts = None if q_lens is None else torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
    rows = PagedRows(
        page_table.to(device),
        slots.to(device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        None if starts is None else starts.to(device),
        max(q_lens or [1]),
    )
    return Case(q.to(dtype), *(pool.to(kv_dtype or dtype) for pool in pools.unbind(0)), rows)
