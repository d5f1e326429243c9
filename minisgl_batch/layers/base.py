"""What a layer with parameters is: it can say which part of which checkpoint tensor goes where.

So weights are loaded without a list of names and shapes beside the layers. Knows nothing of files. Subclassed by the
layers; `models.weights` walks a model's layers and fills their parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from minisgl_kernels.matmul import Operand


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor's share in a parameter of this rank.

    The tensor has floats of any type, or FP8 where the target has.

    Attributes:
        name: the tensor's name below the layer, such as "weight".
        target: the parameter or the view of it that gets filled.
        full_shape: the tensor's shape in the checkpoint.
        dim: the dimension that is split over the ranks.
        start: where this rank's share begins in `dim`; it is as long as the target there.
        sibling: a merged layer's part has the name of the layer that it is in the checkpoint, beside the merged one.
    """

    name: str
    target: torch.Tensor
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    sibling: str | None = None

    @property
    def index(self) -> tuple[slice, ...]:
        """What to take of the checkpoint's tensor."""
        share = slice(self.start, self.start + self.target.shape[self.dim])
        return tuple(share if dim == self.dim else slice(None) for dim in range(len(self.full_shape)))

    @property
    def is_fp8(self) -> bool:
        """Whether the checkpoint's tensor is in FP8."""
        return self.target.dtype == torch.float8_e4m3fn

    @property
    def dtype(self) -> torch.dtype:
        """What its numbers are rounded to."""
        return self.target.dtype

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of the checkpoint has the right shape."""
        return shape == self.full_shape

    def fault(self, values: torch.Tensor) -> str:
        """What is wrong with what `index` names, "" if nothing is."""
        return ""

    def fill(self, values: torch.Tensor) -> None:
        """Put what `index` names where it belongs."""
        self.target.copy_(values)


class Layer(nn.Module, ABC):
    """A module that owns parameters, made uninitialised and without gradients."""

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """Everything that has to be filled, each element of each parameter once."""

    def factors(self) -> Iterator[Operand]:
        """Weights, (out, in), that this layer multiplies with by an algorithm that each rank may choose for itself."""
        return iter(())

    def finish(self) -> None:
        """Called once, when all parts hold their values: the time to lay weights out for the device."""


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> nn.Parameter:
    """Uninitialised memory; `device` None is the context's, such as `with torch.device("meta")`."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
