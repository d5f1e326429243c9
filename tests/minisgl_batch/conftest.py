"""Fixtures of the engine's tests: fresh random inputs that can be repeated, and processes that form TP groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.minisgl_batch.distributed.rank_pool import RankPool
from tests.minisgl_batch.hub_cache import cache
from tests.seeding import seed

__all__ = ["cache", "seed"]

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Groups of gloo ranks by size, each started when first asked for and shared by all tests."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
