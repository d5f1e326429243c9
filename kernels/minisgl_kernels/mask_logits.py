"""Rules tokens out of some rows by masks of bits: what a grammar doesn't allow next. Triton, or the twin."""

from __future__ import annotations

import torch

from minisgl_kernels import reference_sampling
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import jit, tl

_COLUMNS = 4096  # of a program


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, lines: torch.Tensor, vocab_start: int = 0) -> torch.Tensor:
    """The logits, minus infinity where a row's mask has no bit for a token.

    A token that is allowed though it was ruled out before (by a bias, or until `min_tokens`) gets a finite logit below
    all others: it comes where nothing else may.

    Args:
        logits: (num_rows, size), each row contiguous; any float dtype. Column i stands for token `vocab_start + i`.
        masks: (num_masks, num_words) int32, contiguous; bit t % 32 of word t / 32 allows token t; further tokens
            aren't allowed.
        lines: (num_rows,) int32; each row's mask; -1: all tokens are allowed.
        vocab_start: id of the first column.

    Returns:
        (num_rows, size), contiguous, of the same dtype; the argument stays as it is.
    """
    if not support.runs_kernels(logits):
        return reference_sampling.mask_logits(logits, masks, lines, vocab_start)
    num_rows, size = logits.shape
    out = torch.empty((num_rows, size), dtype=logits.dtype, device=logits.device)
    if num_rows:
        grid = (-(-size // _COLUMNS), num_rows)
        _kernel[grid](
            out,
            logits,
            logits.stride(0),
            masks,
            masks.shape[1],
            lines,
            size,
            vocab_start,
            reference_sampling.lowest_allowed(logits.dtype),
            num_columns=_COLUMNS,
        )
    return out


@jit
def _kernel(
    out: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    masks: tl.tensor,
    num_words: tl.tensor,
    lines: tl.tensor,
    size: tl.tensor,
    vocab_start: tl.tensor,
    floor: tl.tensor,
    num_columns: tl.constexpr,
) -> None:
    """One program per row and piece of its columns."""
    row = tl.program_id(1)
    column = tl.program_id(0) * num_columns + tl.arange(0, num_columns)
    inside = column < size
    line = tl.load(lines + row)
    logit = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=inside, other=0.0)
    if line >= 0:
        token = vocab_start + column
        known = inside & (token < num_words * 32)
        word = tl.load(masks + line.to(tl.int64) * num_words + token // 32, mask=known, other=0)
        allowed = (word >> (token % 32)) & 1
        # What overflowed stays as it is, for the sampler to see.
        raised = tl.maximum(logit.to(tl.float32), floor, propagate_nan=tl.PropagateNan.ALL)
        logit = tl.where(allowed != 0, raised, float("-inf")).to(logit.dtype)
    tl.store(out + row.to(tl.int64) * size + column, logit, mask=inside)
