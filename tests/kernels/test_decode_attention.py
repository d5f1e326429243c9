"""The CPU's decode attention kernel against its twin, and the twin against plain mathematics."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl_kernels import cpp, reference_attention
from minisgl_kernels.decode_attention import decode_attention
from minisgl_kernels.e4m3 import E4M3


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """In float64, every head by itself, every pair of tokens looked at."""
    q_len, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    out = torch.empty_like(q, dtype=torch.float64)
    for h in range(num_heads):
        keys, values = k[:, h * num_kv_heads // num_heads].double(), v[:, h * num_kv_heads // num_heads].double()
        for i in range(q_len):
            position = kv_len - q_len + i
            first = 0 if window is None else max(0, position - window + 1)
            weights = (keys[first : position + 1] @ q[i, h].double() * scale).exp()
            total = weights.sum() + (0.0 if sinks is None else sinks[h].double().exp())
            out[i, h] = weights @ values[first : position + 1] / total
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_twin_attends_as_its_definition_says(window: int | None, with_sinks: bool) -> None:
    for _ in range(20):
        num_kv_heads, group, head_dim = random.randint(1, 3), random.randint(1, 5), random.choice([4, 10, 64])
        kv_len = random.randint(1, 40)
        q_len = random.randint(1, kv_len)
        q = torch.randn(q_len, num_kv_heads * group, head_dim)
        k, v = torch.randn(2, kv_len, num_kv_heads, head_dim).unbind(0)
        sinks = torch.randn(q.shape[1]) * 3 if with_sinks else None
        got = reference_attention.attend(q, k, v, head_dim**-0.5, window, sinks)
        assert relative_error(got, plain_attention(q, k, v, head_dim**-0.5, window, sinks)) < 1e-5


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
def test_kernel_agrees_with_its_twin(
    dtype: torch.dtype, page_size: int, group: int, kv_dtype: torch.dtype | None
) -> None:
    assert cpp.load("decode_attention_cpu") is not None, "there is no C++ compiler"
    num_rows, num_kv_heads, head_dim, max_pages = 7, random.randint(1, 3), random.choice([6, 64, 96, 128]), 9
    num_heads = num_kv_heads * group
    shape = (num_rows * max_pages + 3, page_size, num_kv_heads, head_dim)
    k_pool, v_pool = torch.randn(2, *shape).to(kv_dtype or dtype).unbind(0)
    page_table = torch.randperm(shape[0])[: num_rows * max_pages].view(num_rows, max_pages).int()
    slots = torch.randperm(num_rows).int()
    kv_lens = torch.randint(1, max_pages * page_size + 1, (num_rows,), dtype=torch.int32)
    # What projections give: rows of queries with keys and values behind them, so not contiguous.
    q = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)[:, :num_heads]
    some = torch.randn(num_heads) * 3
    for window, sinks in ((None, None), (None, some), (1, some), (page_size + 3, None), (page_size + 3, some)):
        rows = (page_table, slots, kv_lens, head_dim**-0.5, window, sinks)
        got = decode_attention(q, k_pool, v_pool, *rows)
        want = reference_attention.decode_attention(q.float(), k_pool.float(), v_pool.float(), *rows)
        assert got.dtype == dtype
        assert relative_error(got, want) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_kernel_reads_every_e4m3_number() -> None:
    """One token attends to itself alone, so the output is its value, in 16 rows of 16 numbers."""
    pool = torch.arange(256, dtype=torch.uint8).view(E4M3).view(16, 1, 1, 16)
    lines, ones = torch.arange(16, dtype=torch.int32), torch.ones(16, dtype=torch.int32)
    keys = torch.zeros_like(pool)
    got = decode_attention(torch.zeros(16, 1, 16), keys, pool, lines.view(16, 1), lines, ones, 1.0)
    torch.testing.assert_close(got.flatten(), pool.float().flatten(), rtol=0, atol=0, equal_nan=True)


def test_large_scores_overflow_nothing() -> None:
    q = torch.full((1, 2, 8), 200.0)
    k_pool = torch.randn(3, 4, 1, 8) * 200
    v_pool = torch.randn(3, 4, 1, 8)
    args = (torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.tensor([11]).int())
    got = decode_attention(q, k_pool, v_pool, *args, 1.0)
    assert relative_error(got, reference_attention.decode_attention(q, k_pool, v_pool, *args, 1.0)) < 1e-5


def test_the_kernel_leaves_subnormal_numbers_to_the_process() -> None:
    code = "import sys; from minisgl_kernels import cpp; assert cpp.load('decode_attention_cpu'); {}"
    check = "print(sys.float_info.min / 2)"
    printed = subprocess.run([sys.executable, "-c", code.format(check)], capture_output=True, text=True, check=True)
    assert float(printed.stdout) > 0


def test_without_a_compiler_the_twin_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setattr(cpp, "load", cpp.load.__wrapped__)
    q, pool = torch.randn(1, 2, 8), torch.randn(2, 4, 1, 8)
    tables = (torch.tensor([[1, 0]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.tensor([6]).int())
    got = decode_attention(q, pool, pool, *tables, 0.5)
    assert torch.equal(got, reference_attention.decode_attention(q, pool, pool, *tables, 0.5))
    assert "slower" in caplog.text


def test_without_a_cache_folder_kernels_are_built_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = cpp.cache_dir()
    assert folder.is_dir()
    assert folder == cpp.cache_dir()
    assert not folder.is_relative_to(tmp_path)
