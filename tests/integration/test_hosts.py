"""Worker groups on several hosts, which share nothing but Redis and the output's folder, and one group over two."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset as ds
import pytest

from minisgl_workers.embedded_redis import find_server
from tests.integration.conftest import make_command
from tests.integration.hosts import TwoHosts
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import write_rows
from tests.processes import Command

NUM_ROWS, NUM_TOKENS = 36, 30
PORT = 6379
ENGINE = ("--model", "demo", "--num-pages", 1024, "--max-running", 16)


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as both:
        yield both


@pytest.fixture
def redis_url(hosts: TwoHosts, tmp_path: Path) -> Iterator[str]:
    """Of a server on the first host."""
    address = hosts.addresses[0]
    command = [str(find_server()), "--port", str(PORT), "--bind", address, "--dir", str(tmp_path), "--save", ""]
    with subprocess.Popen(
        [*hosts.prefix(0), *command, "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL
    ) as server:
        yield f"redis://{address}:{PORT}"
        server.kill()


class Service:
    """Commands on two hosts."""

    def __init__(self, hosts: TwoHosts, home: Path, url: str) -> None:
        self._hosts, self._home, self._url = hosts, home, url

    def start(self, host: int, *args: object, **options: Any) -> Command:
        prefix = self._hosts.prefix(host)
        return make_command(self._home, *args, **{"prefix": prefix, "MINISGL_REDIS": self._url, **options})

    def submit(self, host: int, folder: Path) -> Path:
        source = write_rows(folder / "rows.jsonl", [{"prompt": f"{i} + 1 ="} for i in range(NUM_ROWS)])
        options = ("--max-tokens", NUM_TOKENS, "--ignore-eos", "--chunk-rows", 5, "--output", folder / "out")
        with self.start(host, "submit", source, "--model", "demo", *options) as submitting:
            submitting.finish()
        return folder / "out"


@pytest.fixture
def service(hosts: TwoHosts, home: Path, redis_url: str) -> Service:
    return Service(hosts, home, redis_url)


def check(output: Path) -> None:
    wait_for("the dataset", (output / "_SUCCESS").exists, 120)
    table = ds.dataset(output, format="parquet").to_table()
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert set(table["completion_tokens"].to_pylist()) == {NUM_TOKENS}


def test_groups_on_two_hosts_share_a_queue(service: Service, tmp_path: Path) -> None:
    with service.start(0, "worker", *ENGINE, "--lease-s", 1) as here, service.start(1, "worker", *ENGINE) as there:
        here.wait_for("serving jobs for demo")
        there.wait_for("serving jobs for demo")
        output = service.submit(1, tmp_path)
        wait_for("the first parts", lambda: list(output.glob("part-*.parquet")), 60)
        here.signal(signal.SIGKILL)  # a host that is gone; the other one takes over what it had
        check(output)
        there.signal(signal.SIGINT)
        there.finish()


def test_one_group_over_two_hosts(hosts: TwoHosts, service: Service, tmp_path: Path) -> None:
    options = (*ENGINE, "--tp", 2, "--nodes", 2, "--rendezvous", f"{hosts.addresses[0]}:29611", "--lease-s", 1)
    with (
        service.start(1, "worker", *options, "--node-rank", 1) as second,
        service.start(0, "worker", *options, "--node-rank", 0) as first,
    ):
        first.wait_for("serving jobs for demo")
        second.wait_for("rank 1 of demo are ready")
        output = service.submit(0, tmp_path)
        wait_for("the first parts", lambda: list(output.glob("part-*.parquet")), 60)
        (rank,) = psutil.Process(second.pid).children()
        os.kill(rank.pid, signal.SIGKILL)
        second.wait_for("rank 1 was killed by SIGKILL; starting the group again")
        first.wait_for("another rank is gone")
        check(output)
        for command in (first, second):
            command.signal(signal.SIGTERM)
            command.finish()
