"""The all-reduce kernels in the emulator, each rank a process that reads the others' memory, against their twins."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl_batch.distributed.group import TPGroup
from minisgl_kernels import one_shot, reference
from tests.kernels.emulation import build_emulator, emulated
from tests.minisgl_batch.distributed.rank_pool import RankPool

HEADER_BYTES = 128 * 8 * 4 + 128 * 4  # as in one_shot.cu
PART_BYTES = 16 * 16
BUFFERS_AT, BUFFER_BYTES = HEADER_BYTES + 2 * 3 * PART_BYTES, 3 * PART_BYTES
EPS = 1e-5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What each rank gives, and the residual stream and weight that all have."""


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


def add_rms_norms(
    tp: TPGroup, library: Path, memory: torch.Tensor, inputs: list[Inputs], block_rows: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's norms and residual streams, call after call, with plain sums between them."""
    kernel, sums = (emulated(library, f"one_shot_{name}") for name in ("add_rms_norm", "all_reduce"))
    addresses = torch.tensor([line.data_ptr() for line in memory])
    aborted = torch.zeros(1, dtype=torch.int32)
    results = []
    for number, ((x, stream, weight), rows) in enumerate(zip(inputs, block_rows, strict=True)):
        residual, normed = stream.clone(), torch.full_like(stream, float("nan"))
        mine, offset = x[tp.rank], -1
        if number % 2:  # in memory that the others read, of which each call has its own here
            offset = BUFFERS_AT + number * BUFFER_BYTES
            mine = memory[tp.rank, offset : offset + mine.nbytes].view(torch.bfloat16).view(mine.shape).copy_(mine)
        kernel(mine, residual, weight, normed, addresses, aborted, tp.rank, rows, PART_BYTES, offset, EPS)
        results.append((normed, residual))
        sums(x[tp.rank][0], torch.empty_like(x[tp.rank][0]), addresses, aborted, tp.rank, 1, PART_BYTES)
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_sum_in_the_order_of_ranks(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    inputs, blocks = [], []
    for _ in range(4):
        num_blocks = random.randint(1, 3)
        num_vectors = random.randint(1, num_blocks * PART_BYTES // 16)
        inputs.append(torch.randn(size, 8 * num_vectors).bfloat16())
        blocks.append(num_blocks)
    memory = torch.zeros(size, HEADER_BYTES + 2 * 3 * PART_BYTES, dtype=torch.uint8).share_memory_()
    answers = rank_pool(size).run(all_reduce, build_emulator(), memory, inputs, blocks)
    for sums in answers:
        for got, x in zip(sums, inputs, strict=True):
            assert torch.equal(got, reference.all_reduce(list(x)))


@pytest.mark.parametrize("max_blocks", [1, 16, 128])
@pytest.mark.parametrize("max_bytes", [16, 10_240, 256 << 10, 4 << 20])
def test_every_tensor_has_room(max_bytes: int, max_blocks: int) -> None:
    for num_bytes in (16, max_bytes, *(random.randint(1, max_bytes // 16) * 16 for _ in range(100))):
        of_block = -(-num_bytes // 16 // one_shot.num_blocks(num_bytes, max_blocks)) * 16
        assert of_block <= one_shot.part_bytes(max_bytes, max_blocks)


def test_a_rank_does_not_wait_for_one_that_is_gone() -> None:
    kernel = emulated(build_emulator(), "one_shot_all_reduce")
    memory = torch.zeros(2, HEADER_BYTES + 2 * PART_BYTES, dtype=torch.uint8)
    addresses = torch.tensor([line.data_ptr() for line in memory])
    x = torch.ones(16).bfloat16()
    kernel(x, torch.empty_like(x), addresses, torch.ones(1, dtype=torch.int32), 0, 1, PART_BYTES)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_added_and_normalised(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    inputs: list[Inputs] = []
    block_rows = []
    for _ in range(4):
        width = 8 * random.choice([1, 5, 12])
        rows = random.randint(1, PART_BYTES // (2 * width))
        num_rows = random.randint(1, 3 * rows)
        x, residual = torch.randn(size, num_rows, width).bfloat16(), torch.randn(num_rows, width).bfloat16()
        inputs.append((x, residual, torch.randn(width).bfloat16()))
        block_rows.append(rows)
    memory = torch.zeros(size, BUFFERS_AT + 4 * BUFFER_BYTES, dtype=torch.uint8).share_memory_()
    for results in rank_pool(size).run(add_rms_norms, build_emulator(), memory, inputs, block_rows):
        for (normed, stream), (x, residual, weight) in zip(results, inputs, strict=True):
            want, want_stream = reference.add_rms_norm(reference.all_reduce(list(x)), residual.clone(), weight, EPS)
            assert torch.equal(stream, want_stream)
            torch.testing.assert_close(normed, want, rtol=1e-2, atol=1e-2)
