"""The `fi` backend: FlashInfer's paged decode and prefill (https://github.com/flashinfer-ai/flashinfer).

Its decode kernel balances rows by a plan that the host makes for each step and copies to the device. One wrapper per
graph size shares its workspaces with the others; only the pinned buffer that a plan leaves from must not be
overwritten while its copy is under way, so two of them take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import fast_decode_plan

from minisgl_batch.attention.base import AttnSpec, DecodeBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.batch import ForwardBatch, IntArray
from minisgl_batch.kvcache.mha_pool import MHAKVCache

_WORKSPACE_BYTES = 256 << 20
_PLAN_BYTES = 8 << 20
_CUDA_CORE_GROUPS = (1, 2, 4, 8)  # of query heads; the kernel without tensor cores knows no others


@dataclass(frozen=True, slots=True)
class Heads:
    """What FlashInfer is told of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    @property
    def use_tensor_cores(self) -> bool:
        return self.num_heads // self.num_kv_heads not in _CUDA_CORE_GROUPS


class FlashInferBackend(DecodeBackend):
    """See the module's docstring.

    Args:
        pool: the KV pool.
        heads: the model's heads on this rank.
        buffers: the decode rows' buffers.
    """

    def __init__(self, pool: MHAKVCache, heads: Heads, buffers: DecodeBuffers) -> None:
        device = pool.k(0).device
        self._pool = pool
        self._heads = heads
        self._buffers = buffers
        self._dtype = pool.k(0).dtype
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plan_buffer = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._planned = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._wrappers: dict[int, Any] = {}
        self._prefill: Any = None

    # ---------------------------------------------------------------- decode

    def prepare_decode(self, num_rows: int, host_indptr: IntArray, host_kv_lens: IntArray) -> Any:
        """Plan for the rows in the decode buffers; the same call serves steps inside and outside of graphs."""
        wrapper = self._wrappers.get(num_rows)
        if wrapper is None:
            wrapper = self._wrappers[num_rows] = self._make_wrapper(num_rows)
        self._turn ^= 1
        self._planned[self._turn].synchronize()
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        page_size = self._pool.page_size
        last_page_lens = torch.from_numpy((host_kv_lens[:num_rows] - 1) % page_size + 1)
        fast_decode_plan(
            wrapper,
            self._buffers.indptr[: num_rows + 1],
            self._buffers.pages,
            last_page_lens,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            page_size,
            window_left=-1 if self._heads.window is None else self._heads.window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            global_override_indptr_cpu=torch.from_numpy(host_indptr[: num_rows + 1]),
        )
        self._planned[self._turn].record()
        return wrapper

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, metadata: Any) -> torch.Tensor:
        out: torch.Tensor = metadata.run(q, (self._pool.k(layer), self._pool.v(layer)))
        return out

    def forward_with_lse(self, q: torch.Tensor, layer: int, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and (num_rows, num_heads) the base-2 logarithm of each head's sum of weights."""
        out, lse = metadata.run(q, (self._pool.k(layer), self._pool.v(layer)), return_lse=True)
        return out, lse

    def _make_wrapper(self, num_rows: int) -> Any:
        buffers = self._buffers
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._heads.use_tensor_cores,
            paged_kv_indptr_buffer=buffers.indptr[: num_rows + 1],
            paged_kv_indices_buffer=buffers.pages,
            paged_kv_last_page_len_buffer=buffers.last_page_lens[:num_rows],
        )
        # Its own are as large as these and would be one pair for each graph size.
        wrapper._int_workspace_buffer = self._plan_buffer
        wrapper._pin_memory_int_workspace_buffer = self._pinned[0]
        # The full plan, once: it chooses and loads the kernel.
        wrapper.plan(
            torch.arange(num_rows + 1, dtype=torch.int32),
            torch.zeros(num_rows, dtype=torch.int32, device=buffers.pages.device),
            torch.ones(num_rows, dtype=torch.int32),
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            self._pool.page_size,
            window_left=-1 if self._heads.window is None else self._heads.window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        torch.cuda.current_stream().synchronize()
        return wrapper

    # --------------------------------------------------------------- prefill

    def prepare_metadata(self, batch: ForwardBatch) -> Any:
        rows = batch.extend
        assert rows is not None
        if self._prefill is None:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._workspace.device)
            self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        page_size, host = self._pool.page_size, batch.host
        kv_lens = torch.from_numpy(host.kv_lens[host.num_decode :])
        num_pages = (kv_lens + page_size - 1) // page_size
        q_lens = torch.from_numpy(host.q_lens[host.num_decode :])
        width = int(num_pages.max())
        pages = batch.page_table[rows.slots.long(), :width]
        listed = torch.arange(width) < num_pages.unsqueeze(1)
        self._prefill.plan(
            _starts(q_lens),
            _starts(num_pages),
            pages[listed.to(pages.device)],
            (kv_lens - 1) % page_size + 1,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            page_size,
            causal=True,
            window_left=-1 if self._heads.window is None else self._heads.window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return self._prefill


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
