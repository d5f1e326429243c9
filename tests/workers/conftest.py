"""Fixtures of the workers' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.workers.delivering import MODEL, Group, group


@pytest.fixture
def running(client: redis.Redis) -> Iterator[Group]:
    """A worker group without an engine, whose rows the test finishes by hand."""
    with group(client, MODEL) as made:
        yield made
