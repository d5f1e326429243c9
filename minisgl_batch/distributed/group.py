"""The tensor-parallel group that layers are built for: who am I, how many are we, and sums over all of us.

Passed to constructors; there is no global rank. `SINGLE` is the group of one, whose collectives do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


class Communicator(Protocol):
    """Collectives over the ranks of one group; each is called by all ranks in the same order.

    They take tensors on the group's devices and on hosts. What is summed or gathered on devices may be captured in a
    CUDA graph.

    Raises:
        RankLostError: another rank is gone.
    """

    def prepare(self, num_bytes: int) -> None:
        """Be ready for sums of up to so many bytes; called once, before `buffer`."""

    def fix_order(self, dtype: torch.dtype) -> bool:
        """From now on the bits of sums and norms of this type depend on neither a tensor's size nor the place in it.

        Called once, before any of them. False: that can't be had here.
        """

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Where to put what `all_reduce` shall sum, if that is faster; it holds the sum until the next call."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, in `x` or as a new tensor; same shape on all ranks, equal bits on all."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`all_reduce`, then `minisgl_kernels.add_rms_norm`: the norm; `residual` is changed in place."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` (equal shapes), stacked: (size, *x.shape)."""

    def describe(self) -> str:
        """What it works by, in words, for logs."""

    def abort(self) -> None:
        """Let collectives that wait for a rank that is gone end, with any result; called from another thread."""

    def close(self) -> None:
        """Free what the collectives hold; none is called afterwards."""


@dataclass(frozen=True)
class TPGroup:
    """One rank's view of its tensor-parallel group.

    Attributes:
        rank: this process's number in [0, size).
        size: how many ranks share the model.
        comm: the collectives; None only in a group of one.
        num_local: how many of the ranks are on this host, and share its memory.
    """

    rank: int = 0
    size: int = 1
    comm: Communicator | None = field(default=None, repr=False)
    num_local: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")
        if self.size > 1 and self.comm is None:
            raise ValueError("a group of several ranks needs a communicator")

    @property
    def local_rank(self) -> int:
        """The rank among those of its host, which is also its GPU's number."""
        return self.rank % self.num_local

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.comm is None else self.comm.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0) if self.comm is None else self.comm.all_gather(x)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return None if self.comm is None else self.comm.buffer(shape, dtype)

    def gather_numbers(self, *numbers: int) -> list[list[int]]:
        """Each rank's numbers, by rank, through the hosts."""
        gathered: list[list[int]] = self.all_gather(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return gathered

    def abort(self) -> None:
        if self.comm is not None:
            self.comm.abort()

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()


SINGLE = TPGroup()
