"""Which bytes of a weight a small kernel brings into the GPU's L2 cache, ahead of the product that reads them.

In a decode step the products are bound by the memory, which idles during the small kernels and launch gaps between
them. Used by the CUDA C++ kernels' callers; csrc/upcoming.cuh asks for the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BUDGET_BYTES = 8 << 20  # more wouldn't come in time; 0 turns it off
_MAX_TOKENS = 256  # with more, the kernels themselves keep the memory busy, and the products the tensor cores
_WAVE_ROWS = 132 * 128  # output rows that a product begins with: a tile on each multiprocessor of an H100 or H200
_LINE_BYTES = 128


class Beginning(NamedTuple):
    """The first `row_bytes` bytes of each of `num_rows` rows; all bytes that are counted are multiples of 16."""

    address: int
    num_rows: int
    row_stride_bytes: int
    row_bytes: int


NOTHING = Beginning(0, 0, 0, 0)


def beginning(weight: torch.Tensor | None, num_tokens: int) -> Beginning:
    """What a product reads first: the first columns of as many output rows as are worked on at once.

    Args:
        weight: (out, in), of any dtype, on a GPU; None where it isn't known.
        num_tokens: rows that it is multiplied with.

    Returns:
        About BUDGET_BYTES bytes; NOTHING if it is of no use, or the rows don't begin at multiples of 16 bytes.
    """
    if weight is None or num_tokens > _MAX_TOKENS or not BUDGET_BYTES:
        return NOTHING
    address, (stride, step), item_bytes = weight.data_ptr(), weight.stride(), weight.itemsize
    if step != 1 or address % 16 or stride * item_bytes % 16:
        return NOTHING
    num_rows = min(len(weight), _WAVE_ROWS)
    row_bytes = weight.shape[1] * item_bytes // 16 * 16
    share = max(BUDGET_BYTES // num_rows // _LINE_BYTES, 1) * _LINE_BYTES
    return Beginning(address, num_rows, stride * item_bytes, min(row_bytes, share))
