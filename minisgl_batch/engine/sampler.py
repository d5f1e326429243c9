"""From logits to tokens: one per row, each by its own penalties, temperature, filters and seed.

The noise of a token depends on (seed, sample index, output position, token id) alone, so a row's sample doesn't depend
on its neighbours, its slot or how the vocabulary is split over ranks. Called by the engine at the end of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.models.base import CausalLM
from minisgl_kernels.adjust_logits import AdjustedRows, adjust_logits
from minisgl_kernels.gumbel import SamplingRows
from minisgl_kernels.mask_logits import mask_logits
from minisgl_kernels.sample_filtered import sample_filtered
from minisgl_kernels.sample_gumbel import sample_gumbel


class MaskedRows(NamedTuple):
    """What tokens rows may have, as `mask_logits` takes it.

    Attributes:
        masks: (num_masks, num_words) int32.
        lines: (num_rows,) int32; -1: any.
    """

    masks: torch.Tensor
    lines: torch.Tensor


def sample_together(
    logits: torch.Tensor,
    rows: SamplingRows,
    model: CausalLM,
    tp: TPGroup,
    *,
    any_filter: bool,
    adjusted: AdjustedRows | None = None,
    masked: MaskedRows | None = None,
) -> torch.Tensor:
    """`sample` from the logits of all ranks' parts of the vocabulary; called by all ranks together.

    Args:
        logits: (num_rows, shard): what `model.logits` gave.
        adjusted: by what to change them first; None where no row has any such value.
        masked: what is ruled out then, whatever they are; None: nothing.
    """
    if adjusted is not None:
        logits = adjust_logits(logits, adjusted, model.vocab_range.start)
    if masked is not None:
        logits = mask_logits(logits, masked.masks, masked.lines, model.vocab_range.start)
    if any_filter:
        return sample(model.gather_logits(logits), rows, any_filter=True)
    return sample(logits, rows, any_filter=False, vocab_start=model.vocab_range.start, tp=tp)


def sample(
    logits: torch.Tensor, rows: SamplingRows, *, any_filter: bool, vocab_start: int = 0, tp: TPGroup = SINGLE
) -> torch.Tensor:
    """Pick one token per row.

    Args:
        logits: (num_rows, shard), any float dtype: this rank's part of the vocabulary; all of it where a row filters,
            because a filter needs the whole distribution.
        rows: which slots the rows are, and their sampling values.
        any_filter: whether some row uses top-k, top-p or min-p.
        vocab_start: id of the first column.
        tp: the ranks that hold the other parts.

    Returns:
        (num_rows,) int32, equal on all ranks; -1 for rows whose logits aren't finite (-inf besides others is).
    """
    if any_filter:
        return sample_filtered(logits, rows)
    scores, ids = sample_gumbel(logits, rows, vocab_start)
    return ids if tp.size == 1 else _best_of_ranks(scores, ids, tp)


def _best_of_ranks(scores: torch.Tensor, ids: torch.Tensor, tp: TPGroup) -> torch.Tensor:
    """The ids of the best scores, (num_rows,) int32; NaN is the best. Ties go to the lower rank, with the lower ids."""
    gathered = tp.all_gather(torch.stack([scores.view(torch.int32), ids]))  # (tp, 2, num_rows)
    best = gathered[:, 0].view(torch.float32).argmax(dim=0, keepdim=True)
    return gathered[:, 1].gather(0, best).squeeze(0)
