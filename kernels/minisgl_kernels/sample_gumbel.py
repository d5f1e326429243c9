"""Picks each row's next token by Gumbel-max, greedy rows by exact argmax, in one pass over the logits.

Triton, or the twin. Knows no filters: `sample_filtered` goes on from what this picks.

Argmax of logits plus Gumbel noise samples from the softmax without computing it. Two logarithms per token would cost
more than reading the logits, so the pass keeps an upper bound of each score, which needs none; only the few lanes whose
bound reaches the best score get theirs computed.
"""

from __future__ import annotations

import torch

from minisgl_kernels import reference_sampling
from minisgl_kernels import triton_support as support
from minisgl_kernels.gumbel import SamplingRows, best_score, log2_floor, noise_bits, row_key
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_LANES = 1024  # 8 tokens per thread
_MAX_BLOCKS = 8  # of `_LANES` tokens in one program; more wouldn't fit into registers
_NUM_PROGRAMS = 2048  # some waves on the largest GPUs


def sample_gumbel(logits: torch.Tensor, rows: SamplingRows, vocab_start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row: of logit / temperature + noise, or of the logit where the temperature is 0.

    Scores depend on the token's id, not on where its logit stands, so ranks that hold parts of the vocabulary can
    compare theirs. Ties go to the lower id. A row with a NaN or infinity has this for a score and -1 for an id, and so
    has one of nothing but -inf. Reads the logits once, greedy rows partly twice (from a cache).

    Args:
        logits: (num_rows, size), each row contiguous; any float dtype.
        rows: which slots the rows are, and their sampling values; filters are ignored.
        vocab_start: id of the first column.

    Returns:
        The best scores, (num_rows,) float32, and their ids, (num_rows,) int32.
    """
    if not support.runs_kernels(logits):
        return reference_sampling.sample_gumbel(logits, rows, vocab_start)
    num_rows, size = logits.shape
    all_blocks = -(-size // _LANES)
    # A power of two, so that few variants are compiled.
    num_blocks = min(_MAX_BLOCKS, 1 << max(1, all_blocks * num_rows // _NUM_PROGRAMS).bit_length() - 1)
    num_splits = -(-all_blocks // num_blocks)
    scores = torch.empty((num_splits + 1, num_rows), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_splits + 1, num_rows), dtype=torch.int32, device=logits.device)
    if num_rows:
        pdl = support.uses_pdl(logits)
        _split_kernel[(num_splits, num_rows)](
            logits,
            rows.slots,
            rows.kv_lens,
            rows.num_prompt,
            rows.seeds,
            rows.sample_indices,
            rows.temperature,
            scores,
            ids,
            logits.stride(0),
            size,
            vocab_start,
            num_blocks=num_blocks,
            num_lanes=_LANES,
            num_warps=max(1, _LANES // 256),
            pdl=pdl,
            launch_pdl=pdl,
        )
        _reduce_kernel[(num_rows,)](
            scores,
            ids,
            num_splits,
            num_rows,
            max_splits=support.next_power_of_2(num_splits),
            num_warps=1,
            pdl=pdl,
            launch_pdl=pdl,
        )
    return scores[-1], ids[-1]


@jit
def _split_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    num_prompt: tl.tensor,
    seeds: tl.tensor,
    sample_indices: tl.tensor,
    temperatures: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    vocab_start: tl.tensor,
    num_blocks: tl.constexpr,
    num_lanes: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row and `num_blocks * num_lanes` tokens; writes their best score and its id."""
    split, row = tl.program_id(0), tl.program_id(1)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    position = tl.load(kv_lens + row).to(tl.int64) - tl.load(num_prompt + slot)
    multiplier, increment = row_key(tl.load(seeds + slot), tl.load(sample_indices + slot), position)

    begin = split * (num_blocks * num_lanes)
    starts = begin + tl.arange(0, num_blocks) * num_lanes
    lanes = tl.arange(0, num_lanes)
    columns = starts[:, None] + lanes[None, :]
    row_logits = logits + row.to(tl.int64) * row_stride
    values = tl.load(row_logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)

    # An upper bound of the best score of each lane, times the temperature.
    ln2: tl.constexpr = 0.6931471805599453
    start_states = (starts + vocab_start).to(tl.uint32) * multiplier + increment
    states = start_states[:, None] + (lanes.to(tl.uint32) * multiplier)[None, :]
    floor = log2_floor(noise_bits(states))
    bounds = tl.reduce(values - floor * (temperature * (ln2 * 2.0**-23)), 0, _max)
    bound = tl.reduce(bounds, 0, _max)

    nothing = float("-inf")
    is_finite = tl.abs(bound) < float("inf")
    best, winner = bound, 0
    if is_finite & (temperature == 0.0):
        # Here the bound is the score, and equal ones are common. To keep the logits would cost too many registers.
        values = tl.load(row_logits + columns, mask=columns < size, other=nothing).to(tl.float32)
        winner = tl.min(tl.where(values == bound, columns, 0x7FFFFFFF))
    elif is_finite:
        best, winner = best_score(
            bounds,
            row_logits,
            starts,
            size,
            vocab_start,
            multiplier,
            increment,
            temperature,
            least=nothing,
            pivot=nothing,
            pivot_column=size,
        )
    place = split * tl.num_programs(1) + row
    tl.store(scores + place, best)
    tl.store(ids + place, tl.where(is_finite, winner + vocab_start, -1))


@jit
def _max(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The greater one; NaN if either is: `tl.max` passes it over."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _reduce_kernel(
    scores: tl.tensor,
    ids: tl.tensor,
    num_splits: tl.tensor,
    num_rows: tl.tensor,
    max_splits: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row; writes the best of its splits behind them."""
    row = tl.program_id(0)
    splits = tl.arange(0, max_splits)
    places = splits * num_rows + row
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    score = tl.load(scores + places, mask=splits < num_splits, other=float("-inf"))
    token = tl.load(ids + places, mask=splits < num_splits, other=0x7FFFFFFF)
    best = tl.reduce(score, 0, _max)
    token = tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0)
    tl.store(scores + num_splits * num_rows + row, best)
    tl.store(ids + num_splits * num_rows + row, tl.where(best == best, token, -1))
