"""Random rows for the sampling kernels' tests, and how two choices of tokens are compared."""

from __future__ import annotations

import random

import torch

from minisgl_kernels import reference_sampling
from minisgl_kernels.gumbel import SamplingRows


def random_rows(num_rows: int, device: torch.device, **changes: torch.Tensor) -> SamplingRows:
    """Rows on shuffled slots, a third of them greedy, without filters. `changes` are given by slot."""
    num_slots = num_rows + 3
    temperature = torch.rand(num_slots) * 1.5 + 0.1
    temperature[torch.rand(num_slots) < 1 / 3] = 0.0
    values = {
        "num_prompt": torch.randint(1, 10, (num_slots,)),
        "seeds": torch.randint(0, (1 << 63) - 1, (num_slots,)),
        "sample_indices": torch.randint(0, 4, (num_slots,)),
        "temperature": temperature,
        "top_k": torch.zeros(num_slots, dtype=torch.int32),
        "top_p": torch.ones(num_slots),
        "min_p": torch.zeros(num_slots),
    }
    slots = torch.randperm(num_slots, dtype=torch.int32)[:num_rows]
    kv_lens = torch.randint(10, 10_000, (num_rows,), dtype=torch.int32)
    rows = SamplingRows(slots, kv_lens, **(values | changes))
    return SamplingRows(*(x.to(device) for x in rows))


def spoiled_logits(size: int, device: torch.device) -> torch.Tensor:
    """(16, size) float32 in which the odd rows hold NaN or infinity, at one place to all, or nothing but -inf."""
    logits = torch.randn(16, size, device=device)
    logits[::4, torch.randint(0, size, (size // 2,), device=device)] = float("-inf")
    nan, inf = float("nan"), float("inf")
    logits[1, random.randrange(size)] = nan
    logits[3, random.randrange(size)] = inf
    logits[5, 7 : size // 2] = nan
    logits[7, 7 : size // 2] = inf
    logits[9], logits[11], logits[13] = nan, inf, -inf
    logits[15] = torch.tensor([nan, inf, -inf], device=device)[torch.randint(0, 3, (size,), device=device)]
    return logits


def scores(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """(num_rows, vocab) float64: logit / temperature + noise; greedy rows' logits."""
    slots = rows.slots.long()
    keys = reference_sampling.noise_keys(
        rows.seeds[slots], rows.sample_indices[slots], rows.kv_lens - rows.num_prompt[slots]
    )
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    temperature = rows.temperature[slots].double().unsqueeze(1)
    noisy = logits.double() / temperature + reference_sampling.gumbel_noise(keys, ids).double()
    return torch.where(temperature > 0.0, noisy, logits.double())


def assert_best(tokens: torch.Tensor, logits: torch.Tensor, rows: SamplingRows) -> None:
    """Each token has the best score of its row, up to the rounding of float32; greedy rows exactly the first best."""
    exact = scores(logits, rows)
    best = exact.max(dim=1).values
    got = exact.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    greedy = rows.temperature[rows.slots.long()] == 0.0
    assert ((best - got) <= torch.where(greedy, 0.0, 1e-6 * (20 + best.abs()))).all()
    assert torch.equal(tokens[greedy], logits[greedy].argmax(dim=1).int())


def assert_best_of_kept(tokens: torch.Tensor, logits: torch.Tensor, rows: SamplingRows) -> None:
    """Each token has the best score among those that its row's filters keep, computed in float64.

    Where rounding decides whether the filters keep a token, either is right.
    """
    exact = scores(logits, rows)
    got = tokens.long().unsqueeze(1)
    assert kept(logits, rows, 1e-5).gather(1, got).all()
    best = exact.masked_fill(~kept(logits, rows, -1e-5), -torch.inf).max(dim=1).values
    assert ((best - exact.gather(1, got).squeeze(1)) <= 1e-6 * (20 + best.abs())).all()


def kept(logits: torch.Tensor, rows: SamplingRows, slack: float) -> torch.Tensor:
    """(num_rows, vocab) bool: what the filters keep when they give in by this share of the probability."""
    slots = rows.slots.long()
    temperature, top_k, top_p, min_p = (x[slots] for x in (rows.temperature, rows.top_k, rows.top_p, rows.min_p))
    scaled = logits.double() / torch.where(temperature > 0.0, temperature, 1.0).unsqueeze(1)
    min_p = (min_p * (1.0 - slack)).double()
    top_p = torch.where(top_p < 1.0, top_p.double() + slack, 1.0)
    values, ids = reference_sampling.filter_logits(scaled, top_k, top_p, min_p)
    mask = torch.empty_like(values, dtype=torch.bool).scatter_(1, ids, values > -torch.inf)
    return torch.where(temperature.unsqueeze(1) > 0.0, mask, scaled == scaled.max(dim=1, keepdim=True).values)
