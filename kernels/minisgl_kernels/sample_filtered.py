"""Picks each row's next token where rows use top-k, top-p or min-p, without sorting: Triton, or the twin.

The filters keep a prefix of the row's tokens in descending order. So the best-scoring token of all, if it is kept, is
the best of those that are; if not, neither is anything that ranks behind it, and the search goes on among what ranks
before it. One pass over the logits tells a token's rank and the probability before it. (FlashInfer rejects samples in
the same way, with fresh random numbers; here the noise stays, so the result is that of sorting.)
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl_kernels import reference_sampling
from minisgl_kernels import triton_support as support
from minisgl_kernels.gumbel import SamplingRows, best_score, log2_floor, noise_bits, row_key
from minisgl_kernels.sample_gumbel import sample_gumbel
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_LANES = 4096
_NUM_WARPS = 16
_KEY_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def sample_filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The best token of each row, as `sample_gumbel` scores them, among those that the row's filters keep.

    What they keep is defined by `reference_sampling.filter_logits`: exactly k tokens, of equal logits those with lower
    ids. Reads the logits once, a row with filters once more, and if its first choice is refused two to four times
    again: more only for flat distributions and for more than a hundred tokens of top-k.

    Args:
        logits: (num_rows, vocab), each row contiguous; float32, float16 or bfloat16.
        rows: which slots the rows are, and their sampling values.

    Returns:
        (num_rows,) int32; -1 as by `sample_gumbel`.
    """
    if not support.runs_kernels(logits):
        return reference_sampling.sample_filtered(logits, rows)
    num_rows, size = logits.shape
    _, tokens = sample_gumbel(logits, rows)
    if num_rows:
        pdl = support.uses_pdl(logits)
        num_blocks = -(-size // _LANES)
        _kernel[(num_rows,)](
            logits,
            *rows,
            tokens,
            logits.stride(0),
            size,
            num_blocks=num_blocks,
            max_blocks=support.next_power_of_2(num_blocks),
            num_lanes=_LANES,
            key_shift=_KEY_SHIFTS[logits.dtype],
            pdl=pdl,
            num_warps=_NUM_WARPS,
            launch_pdl=pdl,
        )
    return tokens


@jit
def _kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    num_prompt: tl.tensor,
    seeds: tl.tensor,
    sample_indices: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    tokens: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    num_blocks: tl.constexpr,
    max_blocks: tl.constexpr,
    num_lanes: tl.constexpr,
    key_shift: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row; `tokens` holds the best of all tokens, and gets the best of those that are kept."""
    row = tl.program_id(0)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    limits_k = (top_k > 0) & (top_k < size)
    token = tl.load(tokens + row)
    if (token >= 0) & (temperature > 0.0) & (limits_k | (top_p < 1.0) | (min_p > 0.0)):
        row_logits = logits + row.to(tl.int64) * row_stride
        scale = 1.4426950408889634 / temperature
        top_k = tl.where(limits_k, top_k, size)
        value = tl.load(row_logits + token).to(tl.float32)
        # Weights are relative to the drawn token's here, because the best one isn't known yet. None overflows: a token
        # that is so much better would have been drawn.
        count, mass, total, highest, second = _scan(row_logits, size, value, token, value, scale, num_blocks, num_lanes)
        peak = tl.max(highest, axis=0)
        weight = tl.exp2((value - peak) * scale)
        mass, total = mass * weight, total * weight
        # Top-p is a share of what top-k leaves, which is at least what stands up to the drawn token.
        kept_mass = tl.where(limits_k, mass + weight, total)
        rejected = _rejects(count, mass, weight, top_k, top_p, min_p, kept_mass)
        least = float("-inf")
        if rejected & limits_k:
            least, kept_mass = _find_top_k(
                row_logits, size, highest, second, peak, top_k, scale, num_blocks, num_lanes, key_shift
            )
            rejected = _rejects(count, mass, weight, top_k, top_p, min_p, kept_mass)
        position = tl.load(kv_lens + row).to(tl.int64) - tl.load(num_prompt + slot)
        multiplier, increment = row_key(tl.load(seeds + slot), tl.load(sample_indices + slot), position)
        while rejected:
            score, column = _best_before(
                row_logits,
                size,
                value,
                token,
                least,
                temperature,
                multiplier,
                increment,
                num_blocks,
                max_blocks,
                num_lanes,
            )
            found = score > float("-inf")  # else all scores overflow, by a small temperature
            token = tl.where(found, column, token)
            value = tl.load(row_logits + token).to(tl.float32)
            count, mass, _, _, _ = _scan(row_logits, size, value, token, peak, scale, num_blocks, num_lanes)
            weight = tl.exp2((value - peak) * scale)
            rejected = found & _rejects(count, mass, weight, top_k, top_p, min_p, kept_mass)
        tl.store(tokens + row, token)


@jit
def _rejects(
    count: tl.tensor,
    mass: tl.tensor,
    weight: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    kept_mass: tl.tensor,
) -> Any:
    """Whether a filter excludes a token of this weight, with `count` tokens of together `mass` ranked before it."""
    beyond_p = (top_p < 1.0) & (mass >= top_p * kept_mass)
    return (count > 0) & ((count >= top_k) | beyond_p | (weight < min_p))


@jit
def _scan(
    logits: tl.tensor,
    size: tl.tensor,
    pivot: tl.tensor,
    pivot_column: tl.tensor,
    reference: tl.tensor,
    scale: tl.tensor,
    num_blocks: tl.constexpr,
    num_lanes: tl.constexpr,
) -> Any:
    """One pass over a row. Weights are exp2((logit - reference) * scale).

    Returns:
        How many tokens rank before the pivot and their weight, the weight of all tokens, and the highest and
        second-highest logit of each lane, (num_lanes,). What a caller doesn't use isn't computed.
    """
    lanes = tl.arange(0, num_lanes)
    counts = tl.zeros((num_lanes,), tl.int32)
    masses, totals = tl.zeros((num_lanes,), tl.float32), tl.zeros((num_lanes,), tl.float32)
    highest = tl.full((num_lanes,), float("-inf"), tl.float32)
    second = highest
    for i in tl.range(num_blocks, num_stages=4):
        columns = i * num_lanes + lanes
        x = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((x - reference) * scale)
        before = (x > pivot) | ((x == pivot) & (columns < pivot_column))
        counts += before.to(tl.int32)
        masses += tl.where(before, weight, 0.0)
        totals += weight
        second = tl.maximum(second, tl.minimum(highest, x))
        highest = tl.maximum(highest, x)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), tl.sum(totals, axis=0), highest, second


@jit
def _best_before(
    logits: tl.tensor,
    size: tl.tensor,
    pivot: tl.tensor,
    pivot_column: tl.tensor,
    least: tl.tensor,
    temperature: tl.tensor,
    multiplier: tl.tensor,
    increment: tl.tensor,
    num_blocks: tl.constexpr,
    max_blocks: tl.constexpr,
    num_lanes: tl.constexpr,
) -> Any:
    """`best_score` of the tokens that are at least `least` and rank before the pivot."""
    lanes = tl.arange(0, num_lanes)
    step = temperature * (0.6931471805599453 * 2.0**-23)
    bounds = tl.full((num_lanes,), float("-inf"), tl.float32)
    for i in tl.range(num_blocks, num_stages=4):
        columns = i * num_lanes + lanes
        x = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        takes_part = (x >= least) & ((x > pivot) | ((x == pivot) & (columns < pivot_column)))
        bound = x - log2_floor(noise_bits(columns.to(tl.uint32) * multiplier + increment)) * step
        bounds = tl.maximum(bounds, tl.where(takes_part, bound, float("-inf")))
    starts = tl.arange(0, max_blocks) * num_lanes
    return best_score(bounds, logits, starts, size, 0, multiplier, increment, temperature, least, pivot, pivot_column)


@jit
def _find_top_k(
    logits: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    second: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    scale: tl.tensor,
    num_blocks: tl.constexpr,
    num_lanes: tl.constexpr,
    shift: tl.constexpr,
) -> Any:
    """The row's k-th highest logit, and the weight of its k highest tokens relative to `peak`.

    The k-th highest of the lanes' two best is a lower bound, and the very value unless some lane holds three of the
    row's best: one pass checks that. Otherwise the value is found by bisection, a pass per step. Both search among
    keys: integers in the order of the logits, without the bits that the logits' type lacks.
    """
    highest_keys, second_keys = _ordered(highest) >> shift, _ordered(second) >> shift
    low = tl.where(_num_at_least(highest_keys, second_keys, 0) >= top_k, 0, -(1 << (31 - shift)))
    for bit in range(31 - shift):
        trial = low + (1 << (30 - shift - bit))
        low = tl.where(_num_at_least(highest_keys, second_keys, trial) >= top_k, trial, low)
    low = tl.maximum(low, -2139095041 >> shift)  # the key of -inf; lower ones are those of NaNs
    # Of the tokens above `high` there are fewer than k; of those above anything less than `low` there are not.
    high = _ordered(peak) >> shift
    pivot = low
    count, mass = 0, 0.0
    while low < high:
        value = _from_key(pivot, shift)
        pivot_count, pivot_mass, _, _, _ = _scan(logits, size, value, -1, peak, scale, num_blocks, num_lanes)
        if pivot_count < top_k:
            high, count, mass = pivot, pivot_count, pivot_mass
        else:
            low = pivot + 1
        pivot = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
    value = _from_key(high, shift)
    return value, mass + (top_k - count) * tl.exp2((value - peak) * scale)


@jit
def _num_at_least(a: tl.tensor, b: tl.tensor, key: tl.tensor) -> Any:
    return tl.sum((a >= key).to(tl.int32) + (b >= key).to(tl.int32), axis=0)


@jit
def _ordered(x: tl.tensor) -> Any:
    """float32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _from_key(key: tl.tensor, shift: tl.constexpr) -> Any:
    """The float32 whose `_ordered`, shifted, is `key`, with zeros for the bits that are missing."""
    bits = key << shift
    return (bits ^ ((bits >> 31) & (0x7FFFFFFF >> shift << shift))).to(tl.float32, bitcast=True)
