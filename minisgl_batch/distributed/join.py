"""Joining a tensor-parallel group: which collectives it gets. Called once by each rank."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store

from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.pynccl_comm import make_communicator
from minisgl_batch.distributed.torch_comm import TorchCommunicator, lost_ranks


def join_group(place: RankPlace, store: Store, device: torch.device, *, use_pynccl: bool = True) -> TPGroup:
    """Join a group; returns when all ranks have joined. Close it with `TPGroup.close`.

    Args:
        place: this rank's.
        store: where the ranks meet.
        device: what tensors of the model are on.
        use_pynccl: call NCCL from Python; else, torch.distributed's.

    Raises:
        RankLostError: not all ranks came.
    """
    if place.size == 1:
        return SINGLE
    with lost_ranks():
        hosts = TorchCommunicator(place, store)
        comm = make_communicator(place, device, hosts, use_pynccl=use_pynccl)
    return TPGroup(place.rank, place.size, comm, place.num_local)
