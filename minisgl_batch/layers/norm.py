"""Root mean square norm of the residual stream, and the additions before it. Used by attention and the models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.layers.base import Layer, Part, new_parameter
from minisgl_kernels.add_rms_norm import add_rms_norm, add_rms_norm_fp8
from minisgl_kernels.matmul import Operand
from minisgl_kernels.quantize_fp8 import quantize


class RMSNorm(Layer):
    """A norm's weight, (size,), and the norm before a block of a pre-norm transformer.

    Attributes:
        eps: added to the mean square.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        tp: TPGroup = SINGLE,
        offset: float = 0.0,
        into_fp8: bool = False,
    ) -> None:
        """
        Args:
            tp: the ranks whose shares of the last block's output are summed first.
            into_fp8: what reads the normalised sum wants it in FP8; see `Weight`.
            offset: the checkpoint's weight is so much less than the one that is multiplied with, which is in float32
                then, as in the models' reference code.
        """
        super().__init__()
        self._tp = tp
        self._offset = offset
        self._into_fp8 = into_fp8
        self.weight = new_parameter((size,), torch.float32 if offset else dtype, device)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[Operand, torch.Tensor]:
        """Add, then normalise.

        Args:
            x: (num_tokens, size), this rank's share of the last block's output.
            residual: same shape, changed in place; None before the first block, where `x` itself, as a whole, starts
                the stream.

        Returns:
            The normalised sum, which the next block reads, and the sum.
        """
        if residual is None or self._tp.comm is None:
            add = add_rms_norm_fp8 if self._into_fp8 else add_rms_norm
            return add(x, residual, self.weight, self.eps)
        normed = self._tp.comm.add_rms_norm(x, residual, self.weight, self.eps)
        return quantize(normed, grouped=False) if self._into_fp8 else normed, residual

    def parts(self) -> Iterator[Part]:
        yield Part("weight", self.weight, tuple(self.weight.shape))

    def finish(self) -> None:
        if self._offset:
            self.weight.add_(self._offset)
