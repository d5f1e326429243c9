"""The matrix of a linear layer, whatever it is kept in: what a layer has to know of it, and the plain one.

Which rows and columns of the checkpoint's matrix a rank holds is for the layers to say. Used by `linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from minisgl_batch.layers.base import Part, new_parameter
from minisgl_batch.layers.packing import linear, pack
from minisgl_kernels.matmul import Operand


@dataclass(frozen=True)
class Source:
    """The checkpoint's layer that a weight's rows come from; see `Part`.

    Attributes:
        shape: of the checkpoint's weight.
        dim, start: the dimension that is split over the ranks, and where this rank's share begins there.
        sibling: the layer's name, where it is a part of a merged one.
    """

    shape: tuple[int, int]
    dim: int = 0
    start: int = 0
    sibling: str | None = None


class Weight(nn.Module, ABC):
    """A matrix, made uninitialised and without gradients.

    Attributes:
        shape: (out_features, in_features).
        reads_fp8: whoever makes the activations may put them into FP8, with a scale per token.
    """

    shape: tuple[int, int]
    reads_fp8 = False

    @abstractmethod
    def multiply(self, x: Operand, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ self.T + bias`, (num_tokens, out_features); into `out`, then without a bias.

        Args:
            x: (num_tokens, in_features) of the model's type, or in FP8 already where the weight has `reads_fp8`.
        """

    @abstractmethod
    def parts(self, rows: slice, source: Source) -> Iterator[Part]:
        """What fills these rows."""

    @abstractmethod
    def by_row(self) -> list[torch.Tensor]:
        """Views of everything, rows first, to change their order."""

    def factors(self) -> Iterator[Operand]:
        """See `Layer.factors`."""
        return iter(())

    def finish(self) -> None:
        """See `Layer.finish`."""


class PlainWeight(Weight):
    """The matrix in the type of the activations, `values`; in a layout that suits the device once it is loaded."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | None) -> None:
        super().__init__()
        self.shape = shape
        self.values = new_parameter(shape, dtype, device)

    def multiply(self, x: Operand, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return linear(x, self.values, bias, out)

    def parts(self, rows: slice, source: Source) -> Iterator[Part]:
        yield Part("weight", self.values[rows], source.shape, source.dim, source.start, source.sibling)

    def by_row(self) -> list[torch.Tensor]:
        return [self.values]

    def factors(self) -> Iterator[Operand]:
        yield self.values

    def finish(self) -> None:
        self.values = pack(self.values)
