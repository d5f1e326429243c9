"""The tensor-parallel group that layers are built for: who am I, how many are we, and sums over all of us.

Passed to constructors; there is no global rank. `SINGLE` is the group of one, whose collectives do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


class Communicator(Protocol):
    """Collectives over the ranks of one group; each is called by all ranks in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, in place where possible; same shape on every rank."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` (equal shapes), stacked: (size, *x.shape)."""

    def close(self) -> None:
        """Free what the collectives hold; none is called afterwards."""


@dataclass(frozen=True)
class TPGroup:
    """One rank's view of its tensor-parallel group.

    Attributes:
        rank: this process's number in [0, size).
        size: how many ranks share the model.
        comm: the collectives; None only in a group of one.
    """

    rank: int = 0
    size: int = 1
    comm: Communicator | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")
        if self.size > 1 and self.comm is None:
            raise ValueError("a group of several ranks needs a communicator")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.comm is None else self.comm.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0) if self.comm is None else self.comm.all_gather(x)

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()


SINGLE = TPGroup()
