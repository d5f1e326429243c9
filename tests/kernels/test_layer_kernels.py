"""The kernels around a layer's matrix products, against their twins in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from minisgl_kernels import reference
from minisgl_kernels.add_rms_norm import add_rms_norm
from minisgl_kernels.e4m3 import E4M3, E4M3_MAX, to_e4m3
from minisgl_kernels.embedding import embedding
from minisgl_kernels.norm_rope_store import norm_rope_store
from minisgl_kernels.silu_and_mul import gelu_and_mul, silu_and_mul
from tests.kernels.errors import DTYPES, assert_close

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def device(layer_device: torch.device) -> torch.device:
    return layer_device


def randn(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


@in_all_dtypes
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm(device: torch.device, dtype: torch.dtype, has_residual: bool) -> None:
    for size in (1024, 2560, 5120, 8192, 1000) if device.type == "cuda" else (random.randrange(2, 70), 64):
        num_tokens = random.choice((1, 256, 5000)) if device.type == "cuda" else random.randrange(1, 5)
        x = randn(num_tokens, size, dtype=dtype, device=device, scale=30.0)
        residual = randn(num_tokens, size, dtype=dtype, device=device) if has_residual else None
        weight = randn(size, dtype=dtype, device=device)
        total = x.float() if residual is None else x.float() + residual.float()
        exact = reference.rms_norm(total.to(dtype).float(), weight.float(), 1e-5)
        twin, twin_stream = reference.add_rms_norm(x, None if residual is None else residual.clone(), weight, 1e-5)
        before = x.clone()
        normed, stream = add_rms_norm(x, residual, weight, 1e-5)
        assert stream is (x if residual is None else residual)
        assert torch.equal(x, before)
        assert_close(stream, total, twin_stream)
        assert_close(normed, exact, twin)


def test_norms_take_float32_weights(device: torch.device) -> None:
    x = randn(5, 64, dtype=torch.bfloat16, device=device)
    weight = 1.0 + 0.01 * torch.randn(2, 64, device=device)
    twin, _ = reference.add_rms_norm(x, None, weight[0], 1e-6)
    exact, _ = reference.add_rms_norm(x.float(), None, weight[0], 1e-6)
    assert_close(add_rms_norm(x, None, weight[0], 1e-6)[0], exact, twin)

    qkv, rope = randn(5, 8 * 64, dtype=torch.bfloat16, device=device), rope_rows(5, 64, torch.bfloat16, device)
    pools = torch.zeros(3, 2, 5, 1, 2, 64, dtype=torch.bfloat16, device=device)
    norms, out_loc = (weight[0], weight[1]), torch.arange(5, dtype=torch.int32, device=device)
    exact = reference.norm_rope_store(qkv.float(), norms, 1e-6, rope.float(), out_loc, *pools[0].float())
    twin = reference.norm_rope_store(qkv, norms, 1e-6, rope, out_loc, *pools[1])
    assert_close(norm_rope_store(qkv, norms, 1e-6, rope, out_loc, *pools[2]), exact, twin)


def test_add_rms_norm_reads_strided_rows(device: torch.device) -> None:
    x = torch.randn(6, 40, device=device)[:, :24]
    weight = torch.randn(24, device=device)
    normed, _ = add_rms_norm(x, None, weight, 1e-6)
    torch.testing.assert_close(normed, reference.rms_norm(x, weight, 1e-6))


@in_all_dtypes
@pytest.mark.parametrize(
    ("activate", "twin"), [(silu_and_mul, reference.silu_and_mul), (gelu_and_mul, reference.gelu_and_mul)]
)
def test_gated_activations(device: torch.device, dtype: torch.dtype, activate: Activation, twin: Activation) -> None:
    for width in (3072, 17408, 1000) if device.type == "cuda" else (random.randrange(8, 40), 1504):
        num_tokens = random.choice((1, 256, 5000)) if device.type == "cuda" else random.randrange(1, 4)
        gate_up = randn(num_tokens, 2 * width, dtype=dtype, device=device, scale=4.0)
        gate_up[0, 0] = -1e4  # where exp(-gate) overflows
        assert_close(activate(gate_up), twin(gate_up.float()), twin(gate_up))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_embedding_of_a_shard_holds_its_own_ids_only(device: torch.device, dtype: torch.dtype) -> None:
    vocab_size, size, num_tokens = (
        (151936, 5120, 5000) if device.type == "cuda" else (50, random.choice((3, 24, 1100)), 7)
    )
    bounds = sorted(random.sample(range(1, vocab_size), 2))
    weight = torch.randn(vocab_size, size, device=device).bfloat16()
    ids = torch.randint(0, vocab_size, (num_tokens,), device=device, dtype=dtype)
    total = torch.zeros(num_tokens, size, device=device).bfloat16()
    for start, stop in ((0, bounds[0]), bounds, (bounds[1], vocab_size)):
        shard = embedding(ids, weight[start:stop], range(start, stop))
        assert torch.equal(shard, reference.embedding(ids, weight[start:stop], range(start, stop)))
        total += shard
    assert torch.equal(total, weight[ids])


def rope_rows(num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    angles = torch.rand(num_tokens, head_dim // 2, device=device) * 6.3
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos, -sin, sin), dim=-1).unflatten(-1, (2, head_dim)).to(dtype)


def shapes(device: torch.device) -> list[tuple[int, int, int, int]]:
    """(num_tokens, num_heads, num_kv_heads, head_dim)"""
    if device.type == "cpu":
        return [
            (random.randrange(1, 5), *s)
            for s in ((3, 1, 64), (16, 8, 6), (10, 2, 20), (9, 9, 16), (2, 1, 128), (2, 1, 256))
        ]
    heads = ((16, 8, 128), (40, 8, 128), (5, 1, 128), (32, 8, 64), (24, 24, 96), (8, 4, 256), (64, 16, 80))
    return [(random.choice((1, 7, 256, 3000)), *s) for s in heads]


@in_all_dtypes
@pytest.mark.parametrize("has_norms", [True, False])
def test_norm_rope_store(device: torch.device, dtype: torch.dtype, has_norms: bool) -> None:
    for num_tokens, num_heads, num_kv_heads, head_dim in shapes(device):
        page_size = random.choice((1, 16, 64))
        num_pages = -(-num_tokens // page_size) + 3
        qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim + 8, dtype=dtype, device=device)[:, :-8]
        norms = None
        if has_norms:
            q_norm, k_norm = randn(2, head_dim, dtype=dtype, device=device).unbind(0)
            norms = q_norm, k_norm
        rope = rope_rows(num_tokens, head_dim, dtype, device)
        out_loc = torch.randperm(num_pages * page_size, device=device)[:num_tokens].int()
        pools, twins, exacts = (
            torch.full((2, num_pages, page_size, num_kv_heads, head_dim), torch.nan, dtype=t, device=device)
            for t in (dtype, dtype, torch.float32)
        )
        wide_norms = None if norms is None else (norms[0].float(), norms[1].float())
        exact = reference.norm_rope_store(qkv.float(), wide_norms, 1e-6, rope.float(), out_loc, *exacts)
        twin = reference.norm_rope_store(qkv, norms, 1e-6, rope, out_loc, *twins)

        got = norm_rope_store(qkv, norms, 1e-6, rope, out_loc, *pools)

        assert got.is_contiguous()
        assert_close(got, exact, twin)
        assert torch.equal(pools[1].nan_to_num(7.0), twins[1].nan_to_num(7.0))  # values go in as they are
        keys, twin_keys, exact_keys = (x[0].flatten(0, 1) for x in (pools, twins, exacts))
        assert_close(keys[out_loc], exact_keys[out_loc], twin_keys[out_loc])
        assert torch.equal(keys.isnan(), twin_keys.isnan())  # nothing is written elsewhere


@in_all_dtypes
def test_norm_rope_store_quantizes_what_it_would_store(device: torch.device, dtype: torch.dtype) -> None:
    """Also values too large for e4m3, and NaN."""
    for num_tokens, num_heads, num_kv_heads, head_dim in random.sample(shapes(device), 2):
        scales = random.choice([(1.0, 1.0), (0.037, 2.9)])
        qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device, scale=200.0)
        qkv[0, -1], qkv[0, -2] = torch.nan, 3e4
        norm = randn(head_dim, dtype=dtype, device=device, scale=30.0)
        rope = rope_rows(num_tokens, head_dim, dtype, device)
        out_loc = torch.randperm(num_tokens + 5, device=device)[:num_tokens].int()
        pools = torch.zeros(2, num_tokens + 5, 1, num_kv_heads, head_dim, dtype=dtype, device=device)
        stored = pools.to(E4M3)
        want = norm_rope_store(qkv, (norm, norm), 1e-6, rope, out_loc, *pools)
        got = norm_rope_store(qkv, (norm, norm), 1e-6, rope, out_loc, *stored, scales)
        # Compiled twice for a GPU, float32 sums may be rounded in other places.
        share = 0.0 if device.type == "cpu" else 1e-3
        torch.testing.assert_close(got, want)
        for part, pool, scale in zip(stored, pools, scales, strict=True):
            stored_as, expected = part.float().nan_to_num(7.3), to_e4m3(pool, scale).float().nan_to_num(7.3)
            assert (stored_as != expected).float().mean() <= share
        assert stored.float().abs().nan_to_num(0.0).max() == E4M3_MAX


def test_overlapping_launches_keep_their_order(device: torch.device) -> None:
    """In a graph each kernel starts before the one ahead has ended; it must wait for what that one writes."""
    if device.type == "cpu":
        pytest.skip("launches overlap on a GPU only")
    inputs = torch.randn(random.choice((3, 256, 2000)), 8192, device=device).bfloat16()
    weight = torch.randn(8192, device=device).bfloat16()
    residuals = [torch.zeros(len(inputs), 8192 >> i, device=device, dtype=torch.bfloat16) for i in range(5)]

    def chain(*, step: Callable[[], None]) -> torch.Tensor:
        x = inputs
        for residual in residuals:
            x, _ = add_rms_norm(x, residual, weight[: x.shape[1]], 1e-6)
            step()
            x = silu_and_mul(x)
            step()
        return x

    chain(step=torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(step=lambda: None)
    for _ in range(20):
        inputs.copy_(torch.randn_like(inputs))
        for residual in residuals:
            residual.zero_()
        want = chain(step=torch.cuda.synchronize)
        for residual in residuals:
            residual.zero_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def test_no_tokens_make_no_launch(device: torch.device) -> None:
    pool = torch.zeros(2, 3, 4, 2, 8, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    rope = torch.zeros(0, 2, 8, device=device)
    assert norm_rope_store(torch.zeros(0, 64, device=device), None, 0.0, rope, none, *pool).shape == (0, 4, 8)
    assert silu_and_mul(torch.zeros(0, 6, device=device)).shape == (0, 3)
    assert embedding(none, torch.zeros(4, 6, device=device), range(4)).shape == (0, 6)
    assert add_rms_norm(torch.zeros(0, 6, device=device), None, torch.ones(6, device=device), 1e-6)[0].shape == (0, 6)
