"""One rank of a group without the others, for looking at what it holds and computes by itself."""

from __future__ import annotations

import torch

from minisgl_batch.distributed.group import TPGroup
from minisgl_kernels.add_rms_norm import add_rms_norm


class _Silent:
    """Collectives whose other ranks add nothing."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, *[torch.zeros_like(x)] * (self._size - 1)])

    def prepare(self, num_bytes: int) -> None:
        pass

    def fix_order(self, dtype: torch.dtype) -> bool:
        return True

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return None

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps)[0]

    def describe(self) -> str:
        return ""

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def lone_rank(rank: int, size: int) -> TPGroup:
    return TPGroup(rank, size, _Silent(size))
