"""Weights in MXFP4, unpacked while they are read: blocks of 32 four-bit numbers with a common power of two.

The format is the Open Compute Project's (Microscaling Formats v1.0). A checkpoint has a tensor X as X_blocks and
X_scales, the other way round than other tensors: (experts, out, in). Called by `checkpoint`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from minisgl_batch.layers.base import Part

BLOCKS, SCALES = "_blocks", "_scales"
DTYPE = "U8"
BLOCK = 32  # numbers, two in a byte
_SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))


def unpacked_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(experts, in, out) of two tensors that belong together; None if they can't."""
    if len(blocks) != 4 or blocks[3] != BLOCK // 2 or blocks[:3] != scales:
        return None
    num_experts, size_out, num_blocks, _ = blocks
    return num_experts, num_blocks * BLOCK, size_out


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(..., num_blocks, 16) and (..., num_blocks) uint8 -> (..., num_blocks * 32) float32."""
    pairs = torch.tensor([(_NUMBERS[byte % 16], _NUMBERS[byte // 16]) for byte in range(256)], device=blocks.device)
    numbers = F.embedding(blocks.int(), pairs).flatten(-2)
    return torch.ldexp(numbers, scales.int().sub_(_SCALE_BIAS).unsqueeze(-1)).flatten(-2)


def read_unpacked(blocks: Any, scales: Any, part: Part) -> None:
    """Fill a part of the whole tensor, (experts, in, out), an expert at a time.

    Args:
        blocks, scales: slices of safetensors files.
    """
    shape = part.full_shape
    experts, inputs, outputs = (range(*index.indices(size)) for index, size in zip(part.index, shape, strict=True))
    rows, columns = slice(outputs.start, outputs.stop), slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
    skipped = inputs.start - columns.start * BLOCK
    for target, expert in zip(part.target, experts, strict=True):
        index = (slice(expert, expert + 1), rows, columns)
        numbers = unpack(*(stored[index][0].to(target.device) for stored in (blocks, scales)))
        target.copy_(numbers[:, skipped : skipped + len(inputs)].t())
