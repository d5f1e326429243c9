"""Merged attention states against attention over all keys at once."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minisgl_kernels import reference_attention
from minisgl_kernels.merge_states import merge_states
from tests.kernels.errors import DTYPES, assert_close, relative_error


def shapes(device: torch.device) -> list[tuple[int, int, int]]:
    """(num_tokens, num_heads, head_dim)"""
    return [(3, 5, 20), (2, 9, 64)] if device.type == "cpu" else [(256, 16, 128), (77, 40, 128), (5, 3, 96)]


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, h, keys) scores and (n, h, keys, d) values -> the output and the natural LSE."""
    return torch.einsum("nhk,nhkd->nhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "twin"])
def test_two_parts_give_the_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch, use_kernel: bool) -> None:
    if not use_kernel:
        monkeypatch.setattr("minisgl_kernels.triton_support.runs_kernels", lambda _: False)
    for n, h, d in shapes(device):
        scores = torch.randn(n, h, 12, device=device) * 20
        values = torch.randn(n, h, 12, d, device=device)
        want, _ = attention(scores, values)
        cut = random.randrange(1, 12)
        out_a, lse_a = attention(scores[..., :cut], values[:, :, :cut])
        out_b, lse_b = attention(scores[..., cut:], values[:, :, cut:])
        by_head = lse_a.T.contiguous().T  # (num_heads, num_tokens) in memory
        got = merge_states(out_a, by_head, out_b, lse_b / math.log(2.0), lse_a_is_log2=False, lse_b_is_log2=True)
        assert relative_error(got, want) < 5e-5
        got = merge_states(out_b, lse_b / math.log(2.0), out_a, by_head, lse_a_is_log2=True, lse_b_is_log2=False)
        assert relative_error(got, want) < 5e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding(device: torch.device, dtype: torch.dtype) -> None:
    for shape in shapes(device):
        a, b = torch.randn(2, *shape, device=device).to(dtype)
        lse_a, lse_b = torch.randn(2, *shape[:2], device=device) * 3
        exact = reference_attention.merge_states(a.float(), lse_a, b.float(), lse_b, False, False)
        twin = reference_attention.merge_states(a, lse_a, b, lse_b, False, False)
        assert_close(merge_states(a, lse_a, b, lse_b, lse_a_is_log2=False, lse_b_is_log2=False), exact, twin)
        merge_states(a, lse_a, b, lse_b, lse_a_is_log2=False, lse_b_is_log2=False, out=b)
        assert_close(b, exact, twin)


@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "twin"])
@pytest.mark.parametrize("mark", [-torch.inf, torch.inf])
def test_an_empty_part_leaves_the_other_as_it_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, mark: float, use_kernel: bool
) -> None:
    if not use_kernel:
        monkeypatch.setattr("minisgl_kernels.triton_support.runs_kernels", lambda _: False)
    a, b = torch.randn(2, 4, 3, 16, device=device).bfloat16()
    lse_a, lse_b = torch.randn(2, 4, 3, device=device) * 50
    a[0], lse_a[0] = torch.nan, mark
    b[1], lse_b[1] = torch.nan, mark
    a[2], b[2], lse_a[2], lse_b[2] = torch.nan, torch.inf, mark, mark
    got = merge_states(a, lse_a, b, lse_b, lse_a_is_log2=False, lse_b_is_log2=True)
    assert torch.equal(got[0], b[0])
    assert torch.equal(got[1], a[1])
    assert torch.equal(got[2], torch.zeros_like(got[2]))
    assert got[3].isfinite().all()
