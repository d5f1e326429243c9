"""Picks each row's next token where rows use top-k, top-p or min-p."""

from __future__ import annotations

import torch

from minisgl_kernels import reference
from minisgl_kernels.gumbel import SamplingRows


def sample_filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The best token of each row among those that its filters keep.

    Args:
        logits: (num_rows, vocab), each row contiguous; any float dtype.
        rows: which slots the rows are, and their sampling values.

    Returns:
        (num_rows,) int32.
    """
    return reference.sample_filtered(logits, rows)
