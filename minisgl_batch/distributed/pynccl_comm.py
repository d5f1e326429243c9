"""Collectives between GPUs by our own means: small sums in one kernel, the rest through NCCL called from Python.

Layers write what is to be summed straight into memory that the other GPUs read, as far as it fits there. Everything may
be captured in CUDA graphs. Hosts' tensors go over gloo.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeVar

import torch

from minisgl_batch.distributed.group import Communicator
from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.torch_comm import TorchCommunicator
from minisgl_kernels import pynccl
from minisgl_kernels.add_rms_norm import add_rms_norm
from minisgl_kernels.one_shot import DTYPES, SIZES, OneShotAllReduce

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_WINDOW_BYTES = 1 << 30
_ONE_SHOT_BYTES = 16 << 20


class PyNcclCommunicator:
    """A Communicator over NCCL, and over another one for hosts' tensors, which it closes.

    Raises:
        NcclError: NCCL doesn't work here; raised by all ranks.
    """

    def __init__(self, place: RankPlace, device: torch.device, hosts: TorchCommunicator) -> None:
        self._place = place
        self._device = device
        self._hosts = hosts
        self._is_aborted = False
        # Any rank may be without NCCL, and then none must wait for it there.
        unique_id = self._agreed("NCCL", pynccl.new_unique_id)
        nccl = None
        if unique_id is not None:
            first = self._exchange(unique_id)[0]
            nccl = self._agreed("NCCL", lambda: pynccl.NcclComm(first, place.rank, place.size, device))
        if nccl is None:
            raise pynccl.NcclError("NCCL doesn't work on all ranks")
        self.nccl = nccl
        self.one_shot = self._make_one_shot()
        self._window: torch.Tensor | None = None
        self._has_fixed_order = False

    def prepare(self, num_bytes: int) -> None:
        num_bytes = min(num_bytes, MAX_WINDOW_BYTES)
        self._window = self._agreed("a window of NCCL's", lambda: self.nccl.new_window(num_bytes))

    def fix_order(self, dtype: torch.dtype) -> bool:
        self._has_fixed_order = self._place.size == 2 or (self.one_shot is not None and dtype in DTYPES)
        return self._has_fixed_order

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.one_shot is not None and num_bytes <= self.one_shot.max_bytes:
            return self.one_shot.buffer(shape, dtype)
        if self._window is None or num_bytes > len(self._window):
            return None
        return self._window[:num_bytes].view(dtype).view(shape)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return self._hosts.all_reduce(x)
        if self.one_shot is not None and self.one_shot.takes(x):
            return self.one_shot.all_reduce(x)
        x = x.contiguous()
        if self._has_fixed_order and self.one_shot is not None and self._place.size > 2:
            # NCCL begins each piece of a tensor at another rank. Of two numbers there is only one sum.
            pieces = x.view(-1).split(self.one_shot.max_bytes // x.itemsize)
            return torch.cat([self.one_shot.all_reduce(piece) for piece in pieces]).view(x.shape)
        self.nccl.all_reduce(x, x)
        return x

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # One kernel for all adds up a row's squares in another order than the norm's own, which large tensors get.
        in_one = x.device.type != "cpu" and not self._has_fixed_order
        if in_one and self.one_shot is not None and self.one_shot.takes_rows(x):
            return self.one_shot.add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)[0]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return self._hosts.all_gather(x)
        gathered = x.new_empty((self._place.size, *x.shape))
        self.nccl.all_gather(x.contiguous(), gathered)
        return gathered

    def describe(self) -> str:
        parts = [f"nccl {pynccl.version()}"]
        if self._window is not None:
            parts.append(f"window {len(self._window) >> 20} MiB")
        if self.one_shot is not None:
            parts.append(f"one-shot to {self.one_shot.max_bytes >> 10} KiB")
        return ", ".join(parts)

    def abort(self) -> None:
        self._is_aborted = True
        if self.one_shot is not None:
            self.one_shot.abort()
        self.nccl.abort()

    def close(self) -> None:
        self._window = None
        if not self._is_aborted:
            torch.cuda.synchronize(self._device)
            self._hosts.all_reduce(torch.zeros(1))  # nobody frees what another one still reads
            if self.one_shot is not None:
                self.one_shot.close()
            self.nccl.close()
        self._hosts.close()

    def _make_one_shot(self) -> OneShotAllReduce | None:
        place, what = self._place, "sums in one kernel"
        if place.num_local != place.size or place.size not in SIZES:
            return None
        # A rank reads from all others, so what pays shrinks with both what it reads and how many it reads from.
        max_bytes = _ONE_SHOT_BYTES // place.size**2
        made = self._agreed(what, lambda: OneShotAllReduce(place.rank, place.size, max_bytes, self._device))
        if made is None:
            return None
        handles = self._exchange(made.handle)
        return self._agreed(what, lambda: made.connect(handles))

    def _exchange(self, mine: bytes) -> list[bytes]:
        """All ranks' bytes, by rank."""
        gathered = self._hosts.all_gather(torch.tensor(list(mine), dtype=torch.uint8))
        return [bytes(theirs) for theirs in gathered.tolist()]

    def _agreed(self, what: str, make: Callable[[], T | None]) -> T | None:
        """What `make` gives, if it gives something on all ranks."""
        try:
            made = make()
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            logger.warning("rank %d goes without %s: %s", self._place.rank, what, error)
            made = None
        everywhere = self._hosts.all_reduce(torch.tensor([made is not None], dtype=torch.int32))
        return made if int(everywhere) == self._place.size else None


def make_communicator(
    place: RankPlace, device: torch.device, hosts: TorchCommunicator, *, use_pynccl: bool
) -> Communicator:
    """The best communicator of a group's device; without PyNCCL, or where it doesn't work, torch.distributed's."""
    if device.type == "cpu" or not use_pynccl:
        return hosts
    try:
        return PyNcclCommunicator(place, device, hosts)
    except pynccl.NcclError as error:
        logger.warning("%s: torch.distributed's is used", error)
        return hosts
