"""The `fi` halves: FlashInfer's paged decode and prefill (https://github.com/flashinfer-ai/flashinfer).

Its kernels balance rows by a plan that the host makes for each step and copies to the device. The decode wrappers of
all graph sizes share their workspaces; only the pinned buffer that a plan leaves from must not be overwritten while its
copy is under way, so two of them take turns.
"""

from __future__ import annotations

from typing import Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import fast_decode_plan

from minisgl_batch.attention.base import AttnHeads, AttnSpec, BackendSetup
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.fa import FlashAttnExtend
from minisgl_batch.attention.hybrid import HybridBackend
from minisgl_batch.attention.parts import ExtendPart, OwnPagesPart, PrefixCosts
from minisgl_batch.attention.two_level import TwoLevelDecode
from minisgl_batch.batch import ForwardBatch, IntArray
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.merge_states import merge_states

_WORKSPACE_BYTES = 256 << 20
_PLAN_BYTES = 8 << 20
CUDA_CORE_GROUPS = (1, 2, 4, 8)  # of query heads; the kernel without tensor cores knows no others


class FlashInferDecode(OwnPagesPart):
    """Attention of decode rows over their own page lists."""

    def __init__(
        self, pool: MHAKVCache, heads: AttnHeads, buffers: DecodeBuffers, *, use_tensor_cores: bool | None = None
    ) -> None:
        """
        Args:
            use_tensor_cores: which of FlashInfer's decode kernels; by default what suits the heads.
        """
        device = pool.k(0).device
        needs_tensor_cores = heads.num_heads // heads.num_kv_heads not in CUDA_CORE_GROUPS
        self._use_tensor_cores = needs_tensor_cores if use_tensor_cores is None else use_tensor_cores
        self.prefix_costs = PrefixCosts(0.12 if self._use_tensor_cores else 0.2, per_row=0.0, per_row_and_head=0.0031)
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

    def make_ready(self, num_rows: int) -> None:
        if num_rows not in self._wrappers:
            self._wrappers[num_rows] = self._make_wrapper(num_rows)

    def prepare(self, num_rows: int, indptr: IntArray, kv_lens: IntArray) -> Any:
        wrapper = self._wrappers[num_rows]
        self._turn ^= 1
        self._planned[self._turn].synchronize()
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        fast_decode_plan(
            wrapper,
            self._buffers.indptr[: num_rows + 1],
            self._buffers.pages,
            torch.from_numpy((kv_lens[:num_rows] - 1) % self._pool.page_size + 1),
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            self._pool.page_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=self._heads.scale,
            global_override_indptr_cpu=torch.from_numpy(indptr[: num_rows + 1]),
        )
        self._planned[self._turn].record()
        return wrapper

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Any) -> torch.Tensor:
        out: torch.Tensor = prepared.run(q, (self._pool.k(layer), self._pool.v(layer)))
        return out

    def forward_behind(
        self, prefix: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Any
    ) -> torch.Tensor:
        out, lse = prepared.run(q, (self._pool.k(layer), self._pool.v(layer)), return_lse=True)
        return merge_states(prefix[0], prefix[1].t(), out, lse, lse_a_is_log2=False, lse_b_is_log2=True, out=out)

    def _make_wrapper(self, num_rows: int) -> Any:
        buffers = self._buffers
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._use_tensor_cores,
            paged_kv_indptr_buffer=buffers.indptr[: num_rows + 1],
            paged_kv_indices_buffer=buffers.pages,
            paged_kv_last_page_len_buffer=buffers.last_page_lens[:num_rows],
        )
        # Its own are as large as these, and would be another pair for each number of rows.
        wrapper._int_workspace_buffer = self._plan_buffer
        wrapper._pin_memory_int_workspace_buffer = self._pinned[0]
        # The full plan, once: it chooses and loads the kernel. It also writes to the buffers, so it has to come before
        # they are filled for a step.
        wrapper.plan(
            torch.arange(num_rows + 1, dtype=torch.int32),
            torch.zeros(num_rows, dtype=torch.int32, device=buffers.pages.device),
            torch.ones(num_rows, dtype=torch.int32),
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            self._pool.page_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=self._heads.scale,
        )
        torch.cuda.current_stream().synchronize()
        return wrapper


class FlashInferExtend(ExtendPart):
    """Attention of extend rows."""

    def __init__(self, pool: MHAKVCache, heads: AttnHeads) -> None:
        self._pool = pool
        self._heads = heads
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.k(0).device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def prepare(self, batch: ForwardBatch) -> Any:
        first, page_size = batch.host.num_decode, self._pool.page_size
        kv_lens = torch.from_numpy(batch.host.kv_lens[first:])
        num_pages = (kv_lens + page_size - 1) // page_size
        width = int(num_pages.max())
        lines = batch.page_table[batch.slots[first:].long(), :width]
        is_page = (torch.arange(width) < num_pages.unsqueeze(1)).view(-1)
        page_places = is_page.nonzero().squeeze(1).to(lines.device, non_blocking=True)
        self._wrapper.plan(
            _starts(torch.from_numpy(batch.host.q_lens[first:])),
            _starts(num_pages),
            lines.reshape(-1)[page_places],
            (kv_lens - 1) % page_size + 1,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            page_size,
            causal=True,
            q_data_type=self._pool.k(0).dtype,
            kv_data_type=self._pool.k(0).dtype,
            sm_scale=self._heads.scale,
        )
        return self._wrapper

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Any) -> torch.Tensor:
        out: torch.Tensor = prepared.run(q, (self._pool.k(layer), self._pool.v(layer)))
        return out


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """(n,) lengths -> (n + 1,) int32 first positions, and the end."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def make_behind_flash_attn(setup: BackendSetup) -> HybridBackend:
    """flash-attn for extend rows, FlashInfer for decode rows, both for those that share prefixes."""
    buffers = setup.make_buffers()
    decode = FlashInferDecode(setup.pool, setup.heads, buffers)
    two_level = TwoLevelDecode(setup.pool, setup.heads, decode, buffers)
    return HybridBackend(FlashAttnExtend(setup.pool), decode, two_level, buffers)


def make(setup: BackendSetup) -> HybridBackend:
    """FlashInfer for all rows."""
    buffers = setup.make_buffers()
    decode = FlashInferDecode(setup.pool, setup.heads, buffers)
    return HybridBackend(FlashInferExtend(setup.pool, setup.heads), decode, None, buffers)
