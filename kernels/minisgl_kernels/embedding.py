"""Token embedding from a shard of the vocabulary: Triton, or the twin."""

from __future__ import annotations

import torch

from minisgl_kernels import reference
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import jit, tl

_BLOCK = 1024


def embedding(ids: torch.Tensor, weight: torch.Tensor, vocab_range: range) -> torch.Tensor:
    """The rows of `ids`; zeros for ids that this shard doesn't hold, so that the shards' results sum to the rows.

    Args:
        ids: (num_tokens,) int32 or int64.
        weight: (at least len(vocab_range), size), contiguous; row i is that of id `vocab_range[i]`.
        vocab_range: the ids that the shard holds, in steps of 1.

    Returns:
        (num_tokens, size), the weight's dtype.
    """
    if not support.runs_kernels(weight):
        return reference.embedding(ids, weight, vocab_range)
    num_tokens, size = len(ids), weight.shape[1]
    out = torch.empty((num_tokens, size), dtype=weight.dtype, device=weight.device)
    if num_tokens:
        num_blocks = -(-size // _BLOCK)
        _kernel[(num_tokens * num_blocks,)](
            ids,
            weight,
            out,
            vocab_range.start,
            vocab_range.stop,
            size=size,
            block=_BLOCK,
            num_blocks=num_blocks,
            num_warps=4,
        )
    return out


@jit
def _kernel(
    ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    vocab_start: tl.tensor,
    vocab_stop: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    num_blocks: tl.constexpr,
) -> None:
    """One program per token and block of columns."""
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * block + tl.arange(0, block)
    inside = columns < size
    row = tl.load(ids + token).to(tl.int64)
    held = (row >= vocab_start) & (row < vocab_stop)
    values = tl.load(weight + (row - vocab_start) * size + columns, mask=inside & held, other=0.0)
    tl.store(out + token * size + columns, values, mask=inside)
