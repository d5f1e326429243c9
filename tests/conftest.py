"""Fixtures for all tests: randomness that can be repeated, and a real Redis server."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from minisgl_batch.client import Client
from minisgl_jobs.connection import connect
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.redis_leaks import leaked_keys

_INTERPRETER = "TRITON_INTERPRET"
if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's kernels run in its interpreter, which has to be asked for before they are imported.
    os.environ.setdefault(_INTERPRETER, "1")


# A shell's background jobs ignore it, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """All kernels are imported; the processes that tests start need no Triton."""
    os.environ.pop(_INTERPRETER, None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if needed:
        import torch

        if torch.cuda.device_count() < needed:
            pytest.skip("needs a CUDA GPU" if needed == 1 else f"needs {needed} CUDA GPUs")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process set up its logging, which is no other test's business."""
    level, handlers = logging.root.level, logging.root.handlers.copy()
    yield
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers


@pytest.fixture
def rng() -> random.Random:
    """Fresh randomness; a failing test shows its seed, and MINISGL_TEST_SEED repeats it."""
    seed = int(os.environ.get("MINISGL_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"MINISGL_TEST_SEED={seed}")  # noqa: T201 (pytest shows it when the test fails)
    return random.Random(seed)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One server for the whole run."""
    with EmbeddedRedis.private() as server:
        yield server


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A connection to an empty Redis. A test that leaves keys behind for ever fails."""
    connection = connect(redis_server.url)
    connection.flushall()
    yield connection
    leaked = leaked_keys(connection)
    connection.close()
    assert not leaked, f"keys that would stay in Redis for ever: {leaked}"


@pytest.fixture
def api(client: redis.Redis, redis_server: EmbeddedRedis) -> Iterator[Client]:
    """A client of an empty Redis."""
    assert client.dbsize() == 0
    with Client(redis_server.url) as made:
        yield made
