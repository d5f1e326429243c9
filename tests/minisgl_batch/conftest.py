"""Fixtures of the engine's tests: fresh random inputs that can be repeated, and processes that form TP groups."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.minisgl_batch.distributed.rank_pool import RankPool

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds all generators anew for each test. A failed test shows its seed; MINISGL_TEST_SEED repeats it."""
    value = int(os.environ.get("MINISGL_TEST_SEED", random.SystemRandom().getrandbits(31)))
    print(f"MINISGL_TEST_SEED={value}")  # noqa: T201 - pytest shows it with a failure
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


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
