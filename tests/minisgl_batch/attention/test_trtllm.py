"""The trtllm backend's metadata, over functions that do in torch what FlashInfer documents its own to do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_batch.attention.base import AttnHeads
from minisgl_batch.errors import InvalidParameterError
from minisgl_kernels import reference_attention
from tests.minisgl_batch.attention.steps import PagedCase, random_rows


def _attend(q: torch.Tensor, cache: Any, tables: torch.Tensor, kv_lens: torch.Tensor, starts: Any, scale: float) -> Any:
    out = []
    for i, kv_len in enumerate(kv_lens.tolist()):
        pages = tables[i, : -(-kv_len // cache[0].shape[1])]
        k, v = (reference_attention.gather_kv(pool, pages, kv_len) for pool in cache)
        out.append(reference_attention.attend(q[starts[i] : starts[i + 1]], k, v, scale))
    return torch.cat(out)


def decode(
    query: torch.Tensor,
    kv_cache: Any,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    kv_layout: str = "HND",
) -> torch.Tensor:
    assert workspace_buffer.count_nonzero() == 0
    assert kv_layout == "NHD"
    assert len(query) == len(block_tables) == len(seq_lens)
    assert int(seq_lens.max()) <= max_seq_len
    return _attend(query, kv_cache, block_tables, seq_lens, range(len(query) + 1), bmm1_scale)  # type: ignore[no-any-return]


def context(
    query: torch.Tensor,
    kv_cache: Any,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    kv_layout: str = "HND",
) -> torch.Tensor:
    assert workspace_buffer.count_nonzero() == 0
    assert (kv_layout, bmm2_scale, batch_size) == ("NHD", 1.0, len(seq_lens))
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert (int(cum_seq_lens_q.diff().max()), int(seq_lens.max())) == (max_q_len, max_kv_len)
    return _attend(query, kv_cache, block_tables, seq_lens, cum_seq_lens_q, bmm1_scale)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill")}
    modules["flashinfer.decode"].trtllm_batch_decode_with_kv_cache = decode  # type: ignore[attr-defined]
    modules["flashinfer.prefill"].trtllm_batch_context_with_kv_cache = context  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "minisgl_batch.attention.trtllm", raising=False)


def case(page_size: int) -> PagedCase:
    return PagedCase("trtllm", AttnHeads(6, 2, 8, 8**-0.5), page_size, 120, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_both_halves_give_plain_attention(page_size: int) -> None:
    paged = case(page_size)
    paged.check(random_rows(20, 0, 120), num_decode=20)
    paged.check(random_rows(0, 9, 120), num_decode=0)
    paged.check(random_rows(7, 5, 120), num_decode=7)


@pytest.mark.parametrize("page_size", [1, 128])
def test_other_page_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(InvalidParameterError, match="16, 32, 64"):
        case(page_size)
