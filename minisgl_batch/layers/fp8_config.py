"""How a linear layer's FP8 weight is scaled, and where it comes from. Knows nothing of torch.

Made by `models.quantization`, used by the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK_SIZE = 128

Scales = Literal["tensor", "channel", "block"]


@dataclass(frozen=True)
class Fp8Config:
    """A weight in FP8 (e4m3), multiplied with activations that are put into FP8 as they come, by token.

    Attributes:
        scales: one for the whole tensor of the checkpoint, one for each output channel, or one for each block of
            BLOCK_SIZE output and as many input channels, where activations have one for so many channels, too.
        is_stored: the checkpoint holds the FP8 weight with its scales; else the weight is put into FP8 as it's loaded.
    """

    scales: Scales
    is_stored: bool

    def block(self, out_features: int, in_features: int) -> tuple[int, int]:
        """The rows and columns that share a scale in a weight of this shape."""
        if self.scales == "block":
            return BLOCK_SIZE, BLOCK_SIZE
        return (out_features if self.scales == "tensor" else 1), in_features
