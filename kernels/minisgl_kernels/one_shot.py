"""All-reduce of small tensors in one kernel that reads the other GPUs' memory: CUDA C++, for the GPUs of one host.

Alone, or with the residual addition and RMS norm that follow it.

Faster than NCCL for what a decode step sums, where latency counts: a rank reads what all others have, over NVLink, so
it is for sizes at which that takes no longer than a barrier. Sums are made in the order of ranks: all ranks get equal
bits. The twins are `reference.all_reduce`, and `reference.add_rms_norm` of it.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import Any

import torch

from minisgl_kernels import cuda
from minisgl_kernels.pynccl import device_bytes

SIZES = (2, 4, 8)  # of the groups that are compiled
DTYPES = (torch.bfloat16, torch.float16)
MAX_BLOCKS = 128
_BLOCK_BYTES = 512 * 16  # what a block's threads load at once
_HANDLE_BYTES = 64
_HEADER_BYTES = 4608
_NUM_BUFFERS = 2  # used in turn: see csrc/one_shot.cu
_MAX_NORM_SIZE = 8192  # a vector of 8 elements for each thread of a block


def num_blocks(num_bytes: int, max_blocks: int) -> int:
    """Blocks that sum a tensor: each as much as its threads load at once, and more only when all have that much."""
    return max(1, min(max_blocks, -(-num_bytes // _BLOCK_BYTES)))


def part_bytes(max_bytes: int, max_blocks: int) -> int:
    """Room for a block's share of any tensor of up to `max_bytes`."""
    return max(_BLOCK_BYTES, -(-max_bytes // max_blocks // 16) * 16 + 16)


class OneShotAllReduce:
    """One rank's end; all ranks make theirs, connect them, and call them in the same order.

    Args:
        rank, size: of the group, whose GPUs are on one host; one of SIZES.
        max_bytes: largest tensor.
        device: this rank's GPU.
        max_blocks: most blocks of the kernel, at most 128, the same on all ranks.

    Attributes:
        handle: what the other ranks connect by.

    Raises:
        ImportError, OSError, RuntimeError: the kernel can't be built, or there is no memory.
    """

    def __init__(
        self, rank: int, size: int, max_bytes: int, device: torch.device, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._functions = _load()
        self._rank = rank
        self._device = device.index
        self.max_bytes = max_bytes
        self._max_blocks = max_blocks
        self._part_bytes = part_bytes(max_bytes, max_blocks)
        self._aborted = torch.zeros(1, dtype=torch.int32).pin_memory()  # the kernels read the host's memory
        handle = torch.zeros(_HANDLE_BYTES, dtype=torch.uint8)
        # A header, two parts for each block, and the buffers.
        self._buffers_at = _HEADER_BYTES + -(-2 * max_blocks * self._part_bytes // 256) * 256
        self._num_bytes = self._buffers_at + _NUM_BUFFERS * max_bytes
        own: int = self._functions["peer_memory_allocate"](self._num_bytes, self._device, handle)
        self._memory = torch.zeros(size, dtype=torch.int64)  # each rank's, as an address of this process
        self._memory[rank] = own
        self.handle = bytes(handle.tolist())
        self._bytes = device_bytes(own, self._num_bytes, device)
        self._last_buffer = 0

    def connect(self, handles: list[bytes]) -> OneShotAllReduce:
        """Open the other ranks' memory, and be ready.

        Raises:
            RuntimeError: this GPU can't read it.
        """
        for peer, theirs in enumerate(handles):
            if peer != self._rank:
                handle = torch.tensor(list(theirs), dtype=torch.uint8)
                self._memory[peer] = self._functions["peer_memory_open"](self._device, handle)
        return self

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that the other ranks can read, for what `add_rms_norm` shall sum; until the next call.

        All ranks ask for their buffers in the same order, and between two of one graph and two of the next there is
        another sum.
        """
        self._last_buffer = (self._last_buffer + 1) % _NUM_BUFFERS
        begin = self._buffers_at + self._last_buffer * self.max_bytes
        return self._bytes[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it can sum such a tensor."""
        return (
            x.dtype in DTYPES
            and x.nbytes <= self.max_bytes
            and x.numel() % 8 == 0
            and x.is_contiguous()
            and x.data_ptr() % 16 == 0
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, as a new tensor, on the current stream.

        Args:
            x: what `takes` allows; the same shape and type on all ranks.
        """
        out = torch.empty_like(x)
        blocks = num_blocks(x.nbytes, self._max_blocks)
        self._functions["one_shot_all_reduce"](
            x.view(-1), out.view(-1), self._memory, self._aborted, self._rank, blocks, self._part_bytes
        )
        return out

    def takes_rows(self, x: torch.Tensor) -> bool:
        """Whether `add_rms_norm` can sum such a tensor, (num_tokens, size)."""
        num_rows, size = x.shape
        fits = self._offset(x) >= 0 or self._block_rows(num_rows) * size * 2 <= self._part_bytes
        return self.takes(x) and num_rows > 0 and size % 8 == 0 and size <= _MAX_NORM_SIZE and fits

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`add_rms_norm` of the sum over the ranks, which is rounded to x's type first; on the current stream.

        Args:
            x: (num_tokens, size), what `takes_rows` allows; the same shape and type on all ranks.
            residual: the same shape and type, contiguous, changed in place.
            weight: (size,), x's dtype.
            eps: added to the mean square.

        Returns:
            The normalised sum, (num_tokens, size).
        """
        normed = torch.empty_like(x)
        self._functions["one_shot_add_rms_norm"](
            x,
            residual,
            weight,
            normed,
            self._memory,
            self._aborted,
            self._rank,
            self._block_rows(len(x)),
            self._part_bytes,
            self._offset(x),
            eps,
        )
        return normed

    def _offset(self, x: torch.Tensor) -> int:
        """Where in the memory that the others read x is; -1 if it isn't there."""
        offset = x.data_ptr() - self._bytes.data_ptr()
        return offset if self._buffers_at <= offset < self._num_bytes else -1

    def _block_rows(self, num_rows: int) -> int:
        return -(-num_rows // self._max_blocks)

    def abort(self) -> None:
        """Let kernels that wait for a rank that is gone end, with any result."""
        self._aborted.fill_(1)

    def close(self) -> None:
        """Give back the memory; no kernel of any rank may run."""
        for peer, memory in enumerate(self._memory.tolist()):
            if peer != self._rank and memory:
                self._functions["peer_memory_close"](self._device, memory)
        self._functions["peer_memory_free"](self._device, int(self._memory[self._rank]))


@cache
def _load() -> Any:
    return import_module("tvm_ffi").load_module(cuda.build_library("one_shot", ("one_shot",)))
