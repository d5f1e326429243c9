"""Root mean square norm, alone and together with the residual addition before it. Used by attention and the models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from minisgl_batch.layers.base import Layer, Part, new_parameter


class _Norm(Layer):
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = new_parameter((size,), dtype, device)
        self._eps = eps

    def parts(self) -> Iterator[Part]:
        yield Part("weight", self.weight, tuple(self.weight.shape))


class RMSNorm(_Norm):
    """Normalises the last dimension, in float32, and scales it by a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) -> the same shape, contiguous."""
        return rms_norm(x, self.weight, self._eps)


class AddRMSNorm(_Norm):
    """The norm before a block of a pre-norm transformer: the residual stream takes in the last block's output first."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then normalise.

        Args:
            x: (num_tokens, size), the last block's output.
            residual: same shape, changed in place; None before the first block, where `x` itself starts the stream.

        Returns:
            The normalised sum, which the next block reads, and the sum.
        """
        residual = x if residual is None else residual.add_(x)
        return rms_norm(residual, self.weight, self._eps), residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The weight is applied after rounding to x's dtype: that is the order of the models' reference code."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype).mul_(weight)
