"""Collectives over a torch.distributed process group: gloo between CPUs, NCCL between GPUs.

Called by each rank's main program, which makes the group first and closes it last. Knows nothing of models.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from minisgl_batch.distributed.group import SINGLE, TPGroup


class TorchCommunicator:
    """A Communicator over a process group that it owns."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, in place."""
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, stacked: (size, *x.shape)."""
        gathered = x.new_empty((self._group.size(), *x.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), x.contiguous(), group=self._group)
        return gathered

    def close(self) -> None:
        """Free the group's connections; CUDA graphs that use them must be gone by then."""
        dist.destroy_process_group(self._group)


def init_tp_group(rank: int, size: int, init_method: str, device: torch.device) -> TPGroup:
    """Join a process's tensor-parallel group; returns when all ranks have joined. Close it with `TPGroup.close`.

    Args:
        rank: this process's number in [0, size).
        size: how many processes join; for one, nothing is set up.
        init_method: where they meet, a torch.distributed URL such as "tcp://127.0.0.1:29500" or "file:///path".
        device: what the tensors are on; "cuda:1" gets NCCL, "cpu" gets gloo.
    """
    if size == 1:
        return SINGLE
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if is_cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        device_id=device if is_cuda else None,
    )
    assert dist.group.WORLD is not None
    return TPGroup(rank, size, TorchCommunicator(dist.group.WORLD))
