"""The all-reduce kernel in the emulator, each rank a process that reads the others' memory, against its twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl_batch.distributed.group import TPGroup
from minisgl_kernels import reference
from tests.kernels.emulation import build_emulator, emulated
from tests.minisgl_batch.distributed.rank_pool import RankPool

HEADER_BYTES = 128 * 8 * 4 + 128 * 4  # as in one_shot_all_reduce.cu
PART_BYTES = 16 * 16


def all_reduce(
    tp: TPGroup, library: Path, memory: torch.Tensor, inputs: list[torch.Tensor], blocks: list[int]
) -> list[torch.Tensor]:
    """This rank's sums, call after call."""
    kernel = emulated(library, "one_shot_all_reduce")
    addresses = torch.tensor([line.data_ptr() for line in memory])
    aborted = torch.zeros(1, dtype=torch.int32)
    sums = []
    for x, num_blocks in zip(inputs, blocks, strict=True):
        sums.append(torch.full_like(x[tp.rank], float("nan")))
        kernel(x[tp.rank], sums[-1], addresses, aborted, tp.rank, num_blocks, PART_BYTES)
    return sums


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_sum_in_the_order_of_ranks(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    inputs, blocks = [], []
    for _ in range(8):
        num_blocks = random.randint(1, 3)
        num_vectors = random.randint(1, num_blocks * PART_BYTES // 16)
        inputs.append(torch.randn(size, 8 * num_vectors).bfloat16())
        blocks.append(num_blocks)
    memory = torch.zeros(size, HEADER_BYTES + 2 * 3 * PART_BYTES, dtype=torch.uint8).share_memory_()
    answers = rank_pool(size).run(all_reduce, build_emulator(), memory, inputs, blocks)
    for sums in answers:
        for got, x in zip(sums, inputs, strict=True):
            assert torch.equal(got, reference.all_reduce(list(x)))


def test_a_rank_does_not_wait_for_one_that_is_gone() -> None:
    kernel = emulated(build_emulator(), "one_shot_all_reduce")
    memory = torch.zeros(2, HEADER_BYTES + 2 * PART_BYTES, dtype=torch.uint8)
    addresses = torch.tensor([line.data_ptr() for line in memory])
    x = torch.ones(16).bfloat16()
    kernel(x, torch.empty_like(x), addresses, torch.ones(1, dtype=torch.int32), 0, 1, PART_BYTES)
