"""The `trtllm` backend: TensorRT-LLM's kernels, as FlashInfer offers them, for extend and for decode rows.

They read lines of the page table and plan nothing on the host. For Blackwell GPUs; not run there by this project yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache

from minisgl_batch.attention.base import AttnSpec, BackendSetup
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.hybrid import HybridBackend
from minisgl_batch.attention.parts import DecodePart, ExtendPart
from minisgl_batch.batch import ForwardBatch, IntArray
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.kvcache.mha_pool import MHAKVCache

PAGE_SIZES = (16, 32, 64)
_WORKSPACE_BYTES = 128 << 20


class _ExtendRows(NamedTuple):
    """What the context kernel is told of a step's extend rows."""

    pages: torch.Tensor  # (num_rows, max_pages) int32
    kv_lens: torch.Tensor  # (num_rows,) int32
    q_starts: torch.Tensor  # (num_rows + 1,) int32
    kv_starts: torch.Tensor  # (num_rows + 1,) int32
    max_q_len: int
    max_kv_len: int


class TrtllmExtend(ExtendPart):
    """Attention of extend rows."""

    def __init__(self, pool: MHAKVCache, workspace: torch.Tensor) -> None:
        self._pool = pool
        self._workspace = workspace

    def prepare(self, batch: ForwardBatch) -> _ExtendRows:
        first, host = batch.host.num_decode, batch.host
        kv_lens = batch.kv_lens[first:]
        max_kv_len = int(host.kv_lens[first:].max())
        num_pages = -(-max_kv_len // self._pool.page_size)
        return _ExtendRows(
            pages=batch.page_table[batch.slots[first:].long(), :num_pages].contiguous(),
            kv_lens=kv_lens,
            q_starts=batch.q_starts[first:] - first,
            kv_starts=torch.nn.functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_q_len=int(host.q_lens[first:].max()),
            max_kv_len=max_kv_len,
        )

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: _ExtendRows) -> torch.Tensor:
        out: torch.Tensor = trtllm_batch_context_with_kv_cache(
            q,
            (self._pool.k(layer), self._pool.v(layer)),
            self._workspace,
            prepared.pages,
            prepared.kv_lens,
            prepared.max_q_len,
            prepared.max_kv_len,
            spec.scale,
            1.0,
            len(prepared.kv_lens),
            prepared.q_starts,
            prepared.kv_starts,
            kv_layout="NHD",
        )
        return out


class TrtllmDecode(DecodePart):
    """Attention of decode rows."""

    def __init__(self, pool: MHAKVCache, buffers: DecodeBuffers, workspace: torch.Tensor) -> None:
        self._pool = pool
        self._kv_lens = buffers.kv_lens
        self._lines = buffers.need_lines()
        self._workspace = workspace

    def make_ready(self, num_rows: int) -> None:
        return  # nothing depends on the number of rows

    def prepare(self, num_rows: int, indptr: IntArray, kv_lens: IntArray) -> int:
        return num_rows

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: int) -> torch.Tensor:
        out: torch.Tensor = trtllm_batch_decode_with_kv_cache(
            q,
            (self._pool.k(layer), self._pool.v(layer)),
            self._workspace,
            self._lines[:prepared],
            self._kv_lens[:prepared],
            self._lines.shape[1] * self._pool.page_size,
            bmm1_scale=spec.scale,
            kv_layout="NHD",
        )
        return out


def make(setup: BackendSetup) -> HybridBackend:
    """
    Raises:
        InvalidParameterError: the kernels can't read pages of this size.
    """
    pool = setup.pool
    if pool.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise InvalidParameterError("page_size", f"trtllm reads pages of {sizes} tokens, not of {pool.page_size}")
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.k(0).device)
    buffers = setup.make_buffers()
    return HybridBackend(TrtllmExtend(pool, workspace), TrtllmDecode(pool, buffers, workspace), None, buffers)
