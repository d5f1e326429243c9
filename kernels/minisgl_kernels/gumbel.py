"""Gumbel noise inside Triton kernels, equal to that of `reference.gumbel_noise`, and what it is keyed by.

Imported by the sampling kernels. Knows no logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minisgl_kernels.triton_support import jit, tl


class SamplingRows(NamedTuple):
    """The rows that a step samples, and every slot's sampling values.

    Attributes:
        slots: (num_rows,) int32; each row's line of the values below.
        kv_lens: (num_rows,) int32; tokens before the one to sample.
        num_prompt: (num_slots,) int64; how many of them are prompt. `kv_lens - num_prompt` is the output position.
        seeds, sample_indices: (num_slots,) int64; with the output position, what a row's noise depends on.
        temperature: (num_slots,) float32; 0 is greedy.
        top_k: (num_slots,) int32; 0 keeps all.
        top_p, min_p: (num_slots,) float32; 1 and 0 keep all.
    """

    slots: torch.Tensor
    kv_lens: torch.Tensor
    num_prompt: torch.Tensor
    seeds: torch.Tensor
    sample_indices: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@jit
def row_key(seed: tl.tensor, sample_index: tl.tensor, position: tl.tensor) -> Any:
    """`reference.noise_keys` of one row, split into (multiplier, increment): two uint32."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    x = seed.to(tl.uint64, bitcast=True) + sample_index.to(tl.uint64, bitcast=True) * golden
    x = mix64(x) + position.to(tl.uint64, bitcast=True) * golden
    x = mix64(x)
    return (x >> 32).to(tl.uint32) | 1, x.to(tl.uint32)


@jit
def mix64(x: tl.tensor) -> Any:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def noise_bits(x: tl.tensor) -> tl.tensor:
    """23 random bits for each x = id * multiplier + increment; both uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x >> 9


@jit
def noise(bits: tl.tensor) -> Any:
    """`reference.gumbel_noise` of `noise_bits`. Costs two exact logarithms."""
    rate = -tl.log(1.0 - (bits.to(tl.float32) + 0.5) * 2.0**-23)
    return -tl.log(rate)


@jit
def log2_floor(bits: tl.tensor) -> Any:
    """At most log2 of the uniform number that `noise` makes of these bits, as (log2 + 127) * 2**23 in float32.

    A float's bit pattern, read as an integer, is its logarithm with straight pieces between the powers of two: at most
    0.09 below.
    """
    u = (bits | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return u.to(tl.int32, bitcast=True).to(tl.float32)


@jit
def best_score(
    bounds: tl.tensor,
    logits: tl.tensor,
    starts: tl.tensor,
    size: tl.tensor,
    first_id: tl.tensor,
    multiplier: tl.tensor,
    increment: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    pivot: tl.tensor,
    pivot_column: tl.tensor,
) -> Any:
    """The best score and its column, looking at lanes in the order of their bounds until none can hold a better one.

    Args:
        bounds: (num_lanes,) upper bound of temperature * (score - 127 ln 2) of lane l's columns `starts + l`.
        logits: pointer to the row.
        starts: first columns.
        size: columns of the row.
        first_id: token id of column 0.
        multiplier, increment: from `row_key`.
        temperature: of the row, above 0.
        least, pivot, pivot_column: only logits that are at least `least` and rank before the pivot take part: higher
            ones, or equal ones of lower columns. -inf and `size` let all take part.

    Returns:
        (score, column); (-inf, the first column) where nothing takes part.
    """
    lanes = tl.arange(0, bounds.shape[0])
    bound, lane = tl.max(bounds, axis=0, return_indices=True, return_indices_tie_break_left=False)
    best, winner = float("-inf"), tl.min(starts, axis=0)
    # Rounding may leave a bound below its score: by this much at most.
    slack = 127 * 0.6931471805599453 + 1e-4 + 1e-6 * tl.abs(bound / temperature)
    while (bound > float("-inf")) & (bound / temperature + slack >= best):
        column = starts + lane
        value = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        state = (column + first_id).to(tl.uint32) * multiplier + increment
        score = tl.div_rn(value, temperature) + noise(noise_bits(state))
        takes_part = (value >= least) & ((value > pivot) | ((value == pivot) & (column < pivot_column)))
        score = tl.where(takes_part & (value > float("-inf")), score, float("-inf"))
        top = tl.max(score, axis=0)
        first = tl.min(tl.where(score == top, column, 0x7FFFFFFF), axis=0)
        winner = tl.where((top > best) | ((top == best) & (first < winner)), first, winner)
        best = tl.maximum(best, top)
        bounds = tl.where(lanes == lane, float("-inf"), bounds)
        bound, lane = tl.max(bounds, axis=0, return_indices=True, return_indices_tie_break_left=False)
    return best, winner
