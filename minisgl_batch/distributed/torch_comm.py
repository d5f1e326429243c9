"""Collectives over torch.distributed: gloo between hosts' tensors, NCCL between GPUs'.

The process groups are made directly, not as torch's global default group, so that a process may have several groups
and a program that uses torch.distributed itself isn't disturbed. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.rendezvous import own_address
from minisgl_batch.errors import RankLostError
from minisgl_kernels.add_rms_norm import add_rms_norm


class TorchCommunicator:
    """A Communicator over process groups of its own; the one of NCCL is made when a GPU's tensor first comes."""

    def __init__(self, place: RankPlace, store: Store) -> None:
        self._place = place
        self._store = store
        self._gloo: Any = self._make_gloo()
        self._nccl: Any = None

    def prepare(self, num_bytes: int) -> None:
        """Nothing to do."""

    def fix_order(self, dtype: torch.dtype) -> bool:
        """Of two numbers there is one sum; of more, libraries choose the order by size and place."""
        return self._place.size == 2

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """It sums anything where it is."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, in place."""
        with lost_ranks():
            self._group(x).allreduce([x]).wait()
        return x

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The norm of the sum over the ranks and the stream."""
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)[0]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, stacked: (size, *x.shape)."""
        gathered = x.new_empty((self._place.size, *x.shape))
        with lost_ranks():
            self._group(x)._allgather_base(gathered.view(-1), x.contiguous().view(-1)).wait()
        return gathered

    def describe(self) -> str:
        return "torch.distributed"

    def abort(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()  # gloo sees by itself that the peer is gone for which it waits

    def close(self) -> None:
        """Free the groups' connections; CUDA graphs that use them must be gone by then."""
        if self._nccl is not None:
            self._nccl.shutdown()
        self._gloo = self._nccl = None

    def _group(self, x: torch.Tensor) -> Any:
        if x.device.type == "cpu":
            return self._gloo
        if self._nccl is None:
            self._nccl = self._make_nccl()
        return self._nccl

    def _make_gloo(self) -> Any:
        # By address: what the host calls itself may lead nowhere.
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(self._place))]
        options._timeout = timedelta(seconds=self._place.timeout_s)
        place = self._place
        return dist.ProcessGroupGloo(PrefixStore("gloo", self._store), place.rank, place.size, options)

    def _make_nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._place.timeout_s)
        place = self._place
        return dist.ProcessGroupNCCL(PrefixStore("nccl", self._store), place.rank, place.size, options)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Errors of torch.distributed as RankLostError."""
    try:
        yield
    except RuntimeError as error:  # gloo's and NCCL's alike
        what = str(error).partition(". ")[0]  # what follows is advice for programmers
        raise RankLostError(f"another rank is gone or doesn't answer: {what}") from error
