"""The reference kernels against plainer mathematics."""

from __future__ import annotations

import math

import pytest
import torch

from minisgl_kernels.reference import gelu_and_mul, rms_norm, silu_and_mul, store_kv
from minisgl_kernels.reference_sampling import filter_logits, gumbel_noise, noise_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_before_it_scales(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 3, 48)[..., :24] * 100).to(dtype)  # strided, as queries are
    weight = torch.randn(24).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    want, got = exact.to(dtype) * weight, rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, want)
    if dtype == torch.bfloat16:  # float32 and float64 rarely round to different neighbours; another order often does
        assert (got != want).float().mean() < 0.02


def test_silu_and_mul_is_its_definition() -> None:
    gate, up = torch.randn(2, 6, 10)
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), -1)), gate / (1 + (-gate).exp()) * up)


def test_gelu_and_mul_is_its_definition() -> None:
    gate, up = torch.randn(2, 5, 9).unbind(0)
    gelu = 0.5 * gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(gelu_and_mul(torch.cat((gate, up), -1)), gelu * up)


def test_store_kv_writes_each_token_to_its_page() -> None:
    k_pool, v_pool = torch.zeros(2, 5, 4, 2, 3).unbind(0)
    k, v = torch.randn(2, 7, 2, 3).unbind(0)
    out_loc = torch.randperm(20)[:7].int()
    store_kv(k, v, k_pool, v_pool, out_loc)
    for i, loc in enumerate(out_loc.tolist()):
        torch.testing.assert_close(k_pool[loc // 4, loc % 4], k[i])
        torch.testing.assert_close(v_pool[loc // 4, loc % 4], v[i])
    assert int((k_pool != 0).any(-1).any(-1).sum()) == 7


def _keys(num_rows: int) -> torch.Tensor:
    rows = torch.arange(num_rows)
    return noise_keys(torch.full((num_rows,), 12345), torch.zeros(num_rows, dtype=torch.int64), rows)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(_keys(2000), torch.arange(500, dtype=torch.int32)).flatten().double()
    euler_gamma, variance = 0.5772156649, math.pi**2 / 6
    assert abs(noise.mean() - euler_gamma) < 0.01
    assert abs(noise.var() - variance) < 0.02
    # Kolmogorov-Smirnov distance to the Gumbel distribution
    cdf = (-(-noise.sort().values).exp()).exp()
    assert (cdf - torch.linspace(0, 1, len(cdf), dtype=torch.float64)).abs().max() < 0.003


def _unmixed(hash_: int) -> int:
    """What the noise's mixing turns into `hash_`: each of its steps backwards."""
    x = hash_ * pow(0xD35A2D97, -1, 1 << 32) % (1 << 32)
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x21F0AAAD, -1, 1 << 32) % (1 << 32)
    return x ^ x >> 16


@pytest.mark.parametrize(("hash_", "uniform"), [(0, 2.0**-24), (0xFFFFFFFF, 1 - 2.0**-24), (1 << 31, 0.5)])
def test_noise_is_finite_at_both_ends(hash_: int, uniform: float) -> None:
    """With one bit more in the uniform number, the last one in 16 million was infinite."""
    noise = gumbel_noise(torch.tensor([_unmixed(hash_)]), torch.zeros(1, dtype=torch.int32))
    assert noise.item() == pytest.approx(-math.log(-math.log(1 - uniform)), abs=1e-6)


def test_noise_of_neighbouring_rows_positions_and_tokens_is_independent() -> None:
    noise = gumbel_noise(_keys(1500), torch.arange(1500, dtype=torch.int32))
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 0.005


def test_noise_depends_on_key_and_token_alone() -> None:
    keys, ids = _keys(8), torch.randint(0, 1 << 18, (64,), dtype=torch.int32)
    together = gumbel_noise(keys, ids)
    shuffled_rows, shuffled_ids = torch.randperm(8), torch.randperm(64)
    apart = gumbel_noise(keys[shuffled_rows], ids[shuffled_ids])
    assert torch.equal(together[shuffled_rows][:, shuffled_ids], apart)
    assert torch.equal(gumbel_noise(keys, ids.expand(8, 64)), together)


@pytest.mark.parametrize("part", ["seed", "sample index", "position"])
def test_each_part_of_the_key_counts(part: str) -> None:
    base = [torch.tensor([(1 << 62) + 3]), torch.tensor([0]), torch.tensor([5])]
    changed = [x + (name == part) for name, x in zip(["seed", "sample index", "position"], base, strict=True)]
    assert noise_keys(*base) != noise_keys(*changed)


def _allowed(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which tokens stay, one at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp(logits[i].item() - logits[order[0]].item()) for i in order]
    probs = [w / sum(weights) for w in weights]
    kept: set[int] = set()
    mass = 0.0
    for rank, (token, prob) in enumerate(zip(order, probs, strict=True)):
        if rank == 0 or ((mass < top_p or top_p >= 1.0) and prob >= min_p * probs[0]):
            kept.add(token)
        mass += prob
    return kept


def test_filters_keep_what_their_definitions_say() -> None:
    num_rows, vocab = 200, 40
    logits = torch.randn(num_rows, vocab) * 3
    top_k = torch.randint(0, vocab + 5, (num_rows,), dtype=torch.int32)
    top_p = torch.rand(num_rows).clamp_min(1e-3)
    top_p[::3] = 1.0
    min_p = torch.rand(num_rows) * 0.5
    min_p[::2] = 0.0
    values, ids = filter_logits(logits, top_k, top_p, min_p)
    for row in range(num_rows):
        kept = {int(i) for i, value in zip(ids[row], values[row], strict=True) if value > -torch.inf}
        assert kept == _allowed(logits[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
