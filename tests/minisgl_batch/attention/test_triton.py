"""What the triton backend tells its kernels: mixed steps, windows, and decode steps that are captured and replayed.

On a CPU the kernels' twin answers; tests/kernels has the kernels themselves.
"""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_batch.attention.base import AttnHeads, AttnSpec
from minisgl_batch.attention.triton import TritonAttention
from tests.minisgl_batch.attention.steps import PagedCase, random_rows, relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def case(device: str) -> PagedCase:
    return PagedCase("triton", AttnHeads(10, 2, 64, 0.2), 16, 100, torch.float32, torch.device(device))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("num_decode", "num_extend"), [(5, 0), (0, 4), (3, 4), (1, 1)])
@pytest.mark.parametrize("device", DEVICES)
def test_steps(device: str, num_decode: int, num_extend: int, window: int | None, with_sinks: bool) -> None:
    paged = case(device)
    sinks = torch.randn(paged.heads.num_heads, device=device) if with_sinks else None
    rows = random_rows(num_decode, num_extend, paged.max_kv_len)
    batch, q = paged.batch(rows, num_decode, None), paged.queries(sum(q_len for _, q_len, _ in rows))
    paged.backend.prepare_metadata(batch)
    got = paged.backend.forward(q, 0, AttnSpec(0.2, window, sinks), batch)
    assert got.is_contiguous()
    assert relative_error(got, paged.expected(q, rows, window, sinks)) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_captured_step_follows_the_buffers(device: str) -> None:
    """Captured with padding alone, replayed with rows and padding behind them."""
    paged, size = case(device), 40
    backend, buffers, q = paged.backend, paged.buffers, paged.queries(size)
    assert isinstance(backend, TritonAttention)
    assert buffers is not None
    captured = paged.batch([(paged.page_table.shape[0] - 1, 1, 1)] * size, size, None)
    captured.slots, captured.kv_lens = buffers.slots[:size], buffers.kv_lens[:size]
    captured.attention = backend.prepare_capture(size, shared=False)
    out = backend.forward(q, 0, paged.spec, captured)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.forward(q, 0, paged.spec, captured)
    for num_rows in (40, 1, random.randint(2, 39)):
        rows = random_rows(num_rows, 0, paged.max_kv_len)
        backend.prepare_replay(paged.batch(rows, num_rows, None).host, size)
        if device == "cuda":
            graph.replay()
        else:
            out = backend.forward(q, 0, paged.spec, captured)
        assert torch.isfinite(out).all()
        assert relative_error(out[:num_rows], paged.expected(q[:num_rows], rows)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 30, 500])
def test_windows_in_bfloat16(window: int) -> None:
    paged = PagedCase("triton", AttnHeads(16, 8, 128, 0.1), 16, 700, torch.bfloat16, torch.device("cuda"))
    rows = random_rows(6, 4, paged.max_kv_len)
    batch, q = paged.batch(rows, 6, None), paged.queries(sum(q_len for _, q_len, _ in rows))
    paged.backend.prepare_metadata(batch)
    got = paged.backend.forward(q, 0, AttnSpec(paged.spec.scale, window), batch)
    assert relative_error(got, paged.expected(q, rows, window)) < 1e-2
