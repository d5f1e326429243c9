"""Root mean square norm of the residual stream, and the addition before it. Used by attention and the models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minisgl_batch.layers.base import Layer, Part, new_parameter
from minisgl_kernels.add_rms_norm import add_rms_norm


class RMSNorm(Layer):
    """A norm's weight, (size,), and the norm before a block of a pre-norm transformer.

    Attributes:
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = new_parameter((size,), dtype, device)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then normalise.

        Args:
            x: (num_tokens, size), the last block's output.
            residual: same shape, changed in place; None before the first block, where `x` itself starts the stream.

        Returns:
            The normalised sum, which the next block reads, and the sum.
        """
        return add_rms_norm(x, residual, self.weight, self.eps)

    def parts(self) -> Iterator[Part]:
        yield Part("weight", self.weight, tuple(self.weight.shape))
