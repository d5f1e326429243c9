"""Processes that are started while Redis is away."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from minisgl_workers.reconnect import connect_patiently
from tests.jobs.helpers import wait_for
from tests.jobs.own_server import OwnServer


def test_a_process_that_starts_while_redis_is_away_waits_for_it(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    connected = threading.Event()
    folder: Path = tmp_path_factory.mktemp("redis")
    with OwnServer(folder) as server:
        server.kill()

        def connect() -> None:
            assert connect_patiently(server.url).ping()
            connected.set()

        thread = threading.Thread(target=connect)
        thread.start()
        wait_for("the first try", lambda: "trying again" in caplog.text)
        assert not connected.is_set()
        server.start()
        assert connected.wait(20)
        thread.join()
    assert caplog.text.count("trying again") == 1
