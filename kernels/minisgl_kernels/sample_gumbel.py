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
    compare theirs. Ties go to the lower id. A row of nothing but -inf gives `vocab_start`; one with a NaN gives some
    token. Reads the logits once, greedy rows partly twice (from a cache).

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
    bounds = tl.max(values - floor * (temperature * (ln2 * 2.0**-23)), axis=0)
    bound = tl.max(bounds, axis=0)

    nothing = float("-inf")
    if (temperature == 0.0) | (bound == float("inf")):
        # Here the bound is the score, and equal ones are common. To keep the logits would cost too many registers.
        best = bound
        values = tl.load(row_logits + columns, mask=columns < size, other=nothing).to(tl.float32)
        first = tl.min(tl.where(values == bound, columns, 0x7FFFFFFF))
        winner = tl.where((bound == nothing) | (first >= size), begin, first)
    else:
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
    tl.store(scores + place, tl.where(best == best, best, nothing))  # a NaN would be no split's best score
    tl.store(ids + place, winner + vocab_start)


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
    best = tl.max(score, axis=0)
    tl.store(scores + num_splits * num_rows + row, best)
    tl.store(ids + num_splits * num_rows + row, tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0))
