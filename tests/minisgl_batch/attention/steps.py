"""Random steps over a random paged pool, and what attention over them must give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl_batch.attention.base import AttentionBackend, AttnHeads, AttnSpec, BackendSetup
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.registry import make_backend
from minisgl_batch.batch import NO_EDITS, ForwardBatch, IntArray, ScheduledBatch, SharedPrefixes
from minisgl_batch.engine.transfer import CudaTransfer
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels import reference_attention

MAX_ROWS = 64
MAX_GROUPS = 4


@dataclass
class PagedCase:
    """A pool with random contents, a page table, and the backend under test.

    Line MAX_ROWS of the table is the dummy row.
    """

    name: str
    heads: AttnHeads
    page_size: int
    max_kv_len: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    with_sinks: bool = False
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        max_pages = -(-self.max_kv_len // self.page_size)
        self.num_pages = MAX_ROWS * max_pages
        self.pool = MHAKVCache(
            num_layers=1,
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_kv_heads=self.heads.num_kv_heads,
            head_dim=self.heads.head_dim,
            dtype=self.kv_dtype or self.dtype,
            device=self.device,
        )
        for part in (self.pool.k(0), self.pool.v(0)):
            part.copy_(torch.randn(part.shape, device=self.device))
        pages = torch.randperm(self.num_pages, dtype=torch.int32).view(MAX_ROWS, max_pages)
        dummy = torch.full((1, max_pages), self.pool.dummy_page, dtype=torch.int32)
        self.page_table = torch.cat([pages, dummy]).to(self.device)
        self.token_pool = torch.zeros((MAX_ROWS + 1, self.max_kv_len + 1), dtype=torch.int32, device=self.device)
        self.buffers: DecodeBuffers | None = None

        def make_buffers() -> DecodeBuffers:
            on_gpu = self.device.type == "cuda"
            upload_into = CudaTransfer(self.device, 1 << 20, MAX_ROWS).upload_into if on_gpu else copy_into
            self.buffers = DecodeBuffers(
                MAX_ROWS, max_pages, MAX_GROUPS, self.page_size, MAX_ROWS, self.device, upload_into, self.window
            )
            return self.buffers

        setup = BackendSetup(self.pool, self.heads, self.dtype, make_buffers)
        self.backend: AttentionBackend = make_backend(self.name, setup)
        sinks = 3.0 + torch.randn(self.heads.num_heads, device=self.device) if self.with_sinks else None
        self.spec = AttnSpec(self.heads.scale, self.window, sinks)

    def share_prefixes(self, groups: list[tuple[int, int]]) -> SharedPrefixes:
        """Let the first rows of the table share pages, (rows, pages) for each group; lines are taken in order."""
        row, pages = 0, []
        for num_rows, num_pages in groups:
            prefix = self.page_table[row, :num_pages].clone()
            self.page_table[row : row + num_rows, :num_pages] = prefix
            pages.append(prefix.cpu().numpy())
            row += num_rows
        return SharedPrefixes(
            np.array([n for n, _ in groups], np.int32),
            np.array([p for _, p in groups], np.int32),
            np.concatenate(pages),
            version=random.randrange(1 << 30),
        )

    def batch(self, rows: list[tuple[int, int, int]], num_decode: int, shared: SharedPrefixes | None) -> ForwardBatch:
        """A step of rows (slot, q_len, kv_len)."""
        slots, q_lens, kv_lens = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        host = ScheduledBatch(
            slots=slots,
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decode=num_decode,
            new_pages=np.full(num_decode, -1, np.int32),
            samples=np.ones(len(rows), np.bool_),
            any_filter=False,
            edits=NO_EDITS,
            shared=shared,
        )
        empty = torch.zeros(0, dtype=torch.int32, device=self.device)
        return ForwardBatch(
            host=host,
            input_ids=empty,
            positions=empty,
            out_loc=empty,
            slots=torch.from_numpy(slots).to(self.device),
            kv_lens=torch.from_numpy(kv_lens).to(self.device),
            q_starts=torch.from_numpy(np.append(0, np.cumsum(q_lens)).astype(np.int32)).to(self.device),
            page_table=self.page_table,
            token_pool=self.token_pool,
            sample_tokens=empty,
            targets=None,
        )

    def queries(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self.heads.num_heads, self.heads.head_dim)
        return torch.randn(shape, device=self.device).to(self.dtype)

    def expected(
        self,
        q: torch.Tensor,
        rows: list[tuple[int, int, int]],
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention row by row, in float32."""
        out, start = [], 0
        for slot, q_len, kv_len in rows:
            pages = self.page_table[slot, : -(-kv_len // self.page_size)]
            k = reference_attention.gather_kv(self.pool.k(0), pages, kv_len).float()
            v = reference_attention.gather_kv(self.pool.v(0), pages, kv_len).float()
            out.append(
                reference_attention.attend(q[start : start + q_len].float(), k, v, self.spec.scale, window, sinks)
            )
            start += q_len
        return torch.cat(out)

    def check(self, rows: list[tuple[int, int, int]], num_decode: int, shared: SharedPrefixes | None = None) -> None:
        batch = self.batch(rows, num_decode, shared)
        q = self.queries(sum(q_len for _, q_len, _ in rows))
        self.backend.prepare_metadata(batch)
        got = self.backend.forward(q, 0, self.spec, batch)
        want = self.expected(q, rows, self.spec.window, self.spec.sinks)
        assert got.shape == want.shape
        assert relative_error(got, want) < (1e-2 if self.dtype == torch.bfloat16 else 1e-5)


def copy_into(target: torch.Tensor, arrays: Sequence[IntArray]) -> None:
    """`CudaTransfer.upload_into` where there is no GPU."""
    values = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    target[: len(values)] = values


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    error = (got.float() - want.float()).norm() / want.float().norm()
    return float(error)


def random_rows(num_decode: int, num_extend: int, max_kv_len: int) -> list[tuple[int, int, int]]:
    """Decode rows, then pieces of prompts: whole ones, ones behind a cached prefix, one token each."""
    slots = random.sample(range(MAX_ROWS), num_decode + num_extend)
    rows = [(slot, 1, random.randint(1, max_kv_len)) for slot in slots[:num_decode]]
    for slot in slots[num_decode:]:
        kv_len = random.randint(1, max_kv_len)
        rows.append((slot, random.choice([kv_len, 1, random.randint(1, kv_len)]), kv_len))
    return rows
