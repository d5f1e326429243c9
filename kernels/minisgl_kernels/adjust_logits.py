"""Changes rows' logits before they are sampled: penalties on tokens that are there, biases, tokens that mustn't come.

Triton, or the twin. Tokens are counted anew in each step, from the pool that also holds the token in flight, so there
is no state to keep right when rows come, go or are retracted. Knows no temperature and no filter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_kernels import reference_sampling
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import jit, tl

_LANES = 1024  # tokens or rules
_NUM_SPLITS = 8  # programs that share a row's tokens
PROMPT_MARK = 1 << 30  # in a token's count: the prompt has it


class AdjustedRows(NamedTuple):
    """The rows whose logits may change, and every slot's values for it.

    A rule is the line (token, bits of a float32 value, end, length): where the row's output position is below `end`,
    `value` is added to the token's logit, if the output ends with the `length - 1` tokens of the lines before this one.
    Lines of length 0 only hold such tokens.

    Attributes:
        slots: (num_rows,) int32; each row's line of the values below.
        kv_lens: (num_rows,) int32; tokens before the one to sample.
        num_prompt: (num_slots,) int64; how many of them are prompt.
        token_pool: (num_slots, width) int32; the tokens.
        presence, frequency, repetition: (num_slots,) float32 penalties; 0, 0 and 1 change nothing.
        num_rules: (num_slots,) int32.
        rules: (num_slots, max_rules, 4) int32, contiguous.
    """

    slots: torch.Tensor
    kv_lens: torch.Tensor
    num_prompt: torch.Tensor
    token_pool: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    num_rules: torch.Tensor
    rules: torch.Tensor


def adjust_logits(logits: torch.Tensor, rows: AdjustedRows, vocab_start: int = 0) -> torch.Tensor:
    """The logits after each row's rules and then its penalties, as float32: bfloat16 would round penalties away.

    A token that the prompt or the output has gets its logit divided by the repetition penalty, or multiplied where it
    isn't positive (Keskar et al. 2019); one that the output has n times loses n * frequency + presence after that.

    Args:
        logits: (num_rows, size), each row contiguous; any float dtype. Column i stands for token `vocab_start + i`.
        rows: which slots the rows are, and their values. Tokens outside of the columns are passed over.
        vocab_start: id of the first column.

    Returns:
        (num_rows, size) float32, contiguous; the argument stays as it is.
    """
    if not support.runs_kernels(logits):
        return reference_sampling.adjust_logits(logits, rows, vocab_start)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    num_rows, size = logits.shape
    if not num_rows:
        return out
    lengths = (rows.slots, rows.kv_lens, rows.num_prompt, rows.token_pool, rows.token_pool.stride(0))
    columns = (size, vocab_start)
    _rule_kernel[(num_rows,)](
        out, *lengths, rows.num_rules, rows.rules, *columns, max_rules=rows.rules.shape[1], num_lanes=_LANES
    )
    penalties = (rows.presence, rows.frequency, rows.repetition)
    grid = (_NUM_SPLITS, num_rows)
    _count_kernel[grid](counts, *lengths, *penalties, *columns, num_lanes=_LANES, mark=PROMPT_MARK)
    _penalty_kernel[grid](out, counts, *lengths, *penalties, *columns, num_lanes=_LANES, mark=PROMPT_MARK)
    return out


@jit
def _rule_kernel(
    out: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    num_prompt: tl.tensor,
    token_pool: tl.tensor,
    pool_stride: tl.tensor,
    num_rules: tl.tensor,
    rules: tl.tensor,
    size: tl.tensor,
    vocab_start: tl.tensor,
    max_rules: tl.constexpr,
    num_lanes: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    num_lines = tl.load(num_rules + slot)
    end_of_text = tl.load(kv_lens + row)
    position = end_of_text - tl.load(num_prompt + slot).to(tl.int32)
    behind = token_pool + slot * pool_stride + end_of_text
    lines = rules + slot * (max_rules * 4)
    start = 0
    while start < num_lines:
        index = start + tl.arange(0, num_lanes)
        places = lines + index * 4
        inside = index < num_lines
        token = tl.load(places, mask=inside, other=0)
        value = tl.load(places + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
        end = tl.load(places + 2, mask=inside, other=0)
        length = tl.load(places + 3, mask=inside, other=0)
        applies = (length > 0) & (length <= position + 1) & (position < end)
        longest = tl.max(tl.where(applies, length, 0), axis=0)
        back = 1
        while back < longest:
            expected = tl.load(places - 4 * back, mask=applies & (back < length), other=0)
            found = tl.load(behind - back)
            applies = applies & ((back >= length) | (expected == found))
            back += 1
        column = token - vocab_start
        applies = applies & (column >= 0) & (column < size)
        # Not a plain addition: a token may have a bias and be one that mustn't come.
        tl.atomic_add(out + row.to(tl.int64) * size + column, value, mask=applies)
        start += num_lanes


@jit
def _count_kernel(
    counts: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    num_prompt: tl.tensor,
    token_pool: tl.tensor,
    pool_stride: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    repetitions: tl.tensor,
    size: tl.tensor,
    vocab_start: tl.tensor,
    num_lanes: tl.constexpr,
    mark: tl.constexpr,
) -> None:
    """`_NUM_SPLITS` programs per row that has a penalty; count its output tokens, and mark those of its prompt."""
    split, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    repeats = tl.load(repetitions + slot) != 1.0
    if repeats | (tl.load(presences + slot) != 0.0) | (tl.load(frequencies + slot) != 0.0):
        first_output = tl.load(num_prompt + slot).to(tl.int32)
        end = tl.load(kv_lens + row)
        start = tl.where(repeats, 0, first_output) + split * num_lanes
        while start < end:
            position = start + tl.arange(0, num_lanes)
            place, counted = _columns(token_pool + slot * pool_stride, position, end, row, size, vocab_start)
            ones = tl.full((num_lanes,), 1, tl.int32)
            tl.atomic_add(counts + place, ones, mask=counted & (position >= first_output))
            tl.atomic_or(counts + place, ones * mark, mask=counted & (position < first_output))
            start += tl.num_programs(0) * num_lanes


@jit
def _penalty_kernel(
    out: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    num_prompt: tl.tensor,
    token_pool: tl.tensor,
    pool_stride: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    repetitions: tl.tensor,
    size: tl.tensor,
    vocab_start: tl.tensor,
    num_lanes: tl.constexpr,
    mark: tl.constexpr,
) -> None:
    """The same programs. Of a token's places in the text, the one that finds its count and takes it does the work."""
    split, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    presence, frequency = tl.load(presences + slot), tl.load(frequencies + slot)
    repetition = tl.load(repetitions + slot)
    repeats = repetition != 1.0
    if repeats | (presence != 0.0) | (frequency != 0.0):
        end = tl.load(kv_lens + row)
        start = tl.where(repeats, 0, tl.load(num_prompt + slot).to(tl.int32)) + split * num_lanes
        while start < end:
            position = start + tl.arange(0, num_lanes)
            place, counted = _columns(token_pool + slot * pool_stride, position, end, row, size, vocab_start)
            found = tl.atomic_xchg(counts + place, tl.zeros((num_lanes,), tl.int32), mask=counted)
            taken = counted & (found != 0)
            logit = tl.load(out + place, mask=taken, other=0.0)
            logit = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
            number = (found & (mark - 1)).to(tl.float32)
            logit = tl.where(number > 0.0, logit - (number * frequency + presence), logit)
            tl.store(out + place, logit, mask=taken)
            start += tl.num_programs(0) * num_lanes


@jit
def _columns(
    text: tl.tensor, position: tl.tensor, end: tl.tensor, row: tl.tensor, size: tl.tensor, vocab_start: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Where the tokens at these positions are in the row of logits, and which of them are in this rank's vocabulary."""
    token = tl.load(text + position, mask=position < end, other=-1)
    column = token - vocab_start
    return row.to(tl.int64) * size + column, (token >= 0) & (column >= 0) & (column < size)
