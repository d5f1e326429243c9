"""The thread that renews leases, with a queue that fails as a test wishes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisgl_batch.errors import RedisUnavailableError
from minisgl_jobs.leases import Lease, Renewal
from minisgl_workers.lease_keeper import LeaseKeeper
from tests.jobs.helpers import make_spec, wait_for


class Queue:
    """Attributes: error: what the next calls raise. run_id: of the server."""

    lease_s = 0.2

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.run_id = "a"
        self.num_calls = 0

    def server_run_id(self) -> str:
        return self.run_id

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return [Renewal.OK for _ in leases]


def lease() -> Lease:
    return Lease(make_spec(), 0, "token", 0, 1, b"", {})


def test_an_outage_ends_no_thread_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue()
    keeper = LeaseKeeper(cast(Any, queue))
    kept = lease()
    keeper.add(kept, time.monotonic())
    queue.error = RedisUnavailableError("Redis is away")
    keeper.start()
    wait_for("some tries", lambda: queue.num_calls > 3)
    wait_for("the end of the lease", lambda: not keeper.holds(kept))
    queue.error = None
    wait_for("its renewal", lambda: keeper.holds(kept))
    assert keeper.news() == []
    keeper.stop()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_defect_in_the_thread_is_raised_where_it_is_seen() -> None:
    queue = Queue()
    keeper = LeaseKeeper(cast(Any, queue))
    queue.error = ZeroDivisionError("a defect")
    keeper.start()
    with pytest.raises(ZeroDivisionError):
        wait_for("the defect", lambda: keeper.news() and None)
    keeper.stop()


def test_another_server_is_noticed_once() -> None:
    queue = Queue()
    keeper = LeaseKeeper(cast(Any, queue))
    keeper.add(lease(), time.monotonic())
    keeper.renew()
    assert not keeper.saw_another_server()
    queue.run_id = "b"
    keeper.renew()
    assert keeper.saw_another_server()
    assert not keeper.saw_another_server()


def test_a_lease_that_was_let_go_is_nobodys() -> None:
    keeper = LeaseKeeper(cast(Any, SimpleNamespace(lease_s=60.0)))
    kept = lease()
    assert not keeper.holds(kept)
    keeper.add(kept, time.monotonic())
    assert keeper.holds(kept)
    keeper.remove(kept)
    assert not keeper.holds(kept)
