"""Collectives over gloo, and groups of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore

from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.distributed.join import join_group
from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.pynccl_comm import make_communicator
from minisgl_batch.distributed.torch_comm import TorchCommunicator
from tests.minisgl_batch.distributed.rank_pool import RankPool


def collect(tp: TPGroup, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's gathered and summed inputs."""
    mine = inputs[tp.rank].clone()  # sent tensors share memory with the test, and sums are in place
    return tp.all_gather(mine), tp.all_reduce(mine)


def gpu_communicator(tp: TPGroup) -> tuple[str, float]:
    """What a group without GPUs gets for them, and that its hosts still talk to each other."""
    hosts = tp.comm
    assert isinstance(hosts, TorchCommunicator)
    comm = make_communicator(hosts._place, torch.device("cuda", tp.rank), hosts, use_pynccl=True)
    return comm.describe(), float(comm.all_reduce(torch.ones(1)))


def place(tp: TPGroup) -> tuple[int, int]:
    return tp.rank, tp.size


def fail_on_the_last(tp: TPGroup) -> None:
    if tp.rank == tp.size - 1:
        raise ValueError("on purpose")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size: int, dtype: torch.dtype, rank_pool: Callable[[int], RankPool]) -> None:
    inputs = torch.randint(-8, 8, (size, 5, 7)).to(dtype)  # small whole numbers add up exactly
    for gathered, total in rank_pool(size).run(collect, list(inputs)):
        assert torch.equal(gathered, inputs)
        assert torch.equal(total, inputs.sum(0))


def test_gathering_takes_views_that_are_not_contiguous(rank_pool: Callable[[int], RankPool]) -> None:
    inputs = torch.randn(2, 6, 4).transpose(1, 2)
    for gathered, _ in rank_pool(2).run(collect, list(inputs)):
        assert torch.equal(gathered, inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_nccl_all_ranks_fall_back_together(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(gpu_communicator) == [("torch.distributed", 2.0)] * 2


def test_ranks_know_their_place(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(4).run(place) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_rank_that_fails_is_named(rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*on purpose"):
        rank_pool(2).run(fail_on_the_last)


def test_a_group_of_one_needs_no_processes() -> None:
    tp = join_group(RankPlace(rank=0, size=1, meet="", num_local=1), HashStore(), torch.device("cpu"))
    assert tp is SINGLE
    x = torch.randn(3)
    assert torch.equal(tp.all_reduce(x), x)
    assert torch.equal(tp.all_gather(x), x.unsqueeze(0))
    tp.close()
