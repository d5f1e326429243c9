"""Users submit, follow, cancel, retry, pause and purge at random while workers are killed: jobs end as they say."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from minisgl_batch.client import Client, JobHandle
from minisgl_batch.errors import JobNotFoundError, JobStateError
from minisgl_jobs.connection import connect
from minisgl_jobs.dataset import SUCCESS, read_manifest
from minisgl_jobs.model import JobState
from minisgl_jobs.row_texts import RowFinished
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.processes import Command
from tests.workers.echo_group import MODEL, start_echo_group
from tests.workers.echo_rank import EchoConfig

DURATION_S = 60.0


class Users:
    """Everything that they do, and two groups that serve them."""

    def __init__(self, api: Client, redis_url: str, folder: Path, rng: random.Random) -> None:
        self._api = api
        self._redis_url = redis_url
        self._folder = folder
        self._rng = rng
        self._num_jobs = 0
        self.jobs: list[JobHandle] = []
        self.readers: list[threading.Thread] = []
        self.seen_twice: list[tuple[str, int]] = []
        self.groups: list[Command] = [self._start(), self._start()]

    def act(self) -> None:
        """Do something at random; what can't be done at the moment is refused, and that is all."""
        often: list[Callable[[], None]] = [self.submit] * 5
        acts = [self.follow, self.cancel, self.cancel, self.retry, self.retry, self.purge, self.pause, self.kill]
        with suppress(JobStateError, JobNotFoundError):
            self._rng.choice(often + acts)()

    def submit(self, after: JobHandle | None = None) -> None:
        rows = [{"prompt": f"row {i}" if self._rng.random() > 0.1 else ""} for i in range(self._rng.randrange(1, 60))]
        job = self._api.submit(
            rows,
            model=MODEL,
            output=self._folder / str(self._num_jobs),
            max_tokens=self._rng.choice([1, 20, 200]),
            ignore_eos=True,
            on_error="record",
            chunk_rows=self._rng.randrange(1, 20),
            after=after,
        )
        self._num_jobs += 1
        self.jobs.append(job)
        if self._rng.random() < 0.5:
            self.readers.append(threading.Thread(target=self._read, args=(job,), daemon=True))
            self.readers[-1].start()

    def follow(self) -> None:
        self.submit(after=self._any())

    def cancel(self) -> None:
        self._any().cancel()

    def retry(self) -> None:
        self._any().retry()

    def purge(self) -> None:
        job = self._any()
        job.purge()
        self.jobs.remove(job)

    def pause(self) -> None:
        (self._api.pause if self._rng.random() < 0.5 else self._api.resume)(MODEL)

    def kill(self) -> None:
        if self._rng.random() < 0.4:
            number = self._rng.randrange(2)
            os.kill(self.groups[number].pid, signal.SIGKILL)
            self.groups[number] = self._start()

    def _any(self) -> JobHandle:
        if not self.jobs:
            raise JobNotFoundError("there is none yet")
        return self._rng.choice(self.jobs)

    def _start(self) -> Command:
        return start_echo_group(self._redis_url, engine=EchoConfig(step_s=0.005, max_running=16), lease_s=2.0)

    def _read(self, job: JobHandle) -> None:
        finished: set[tuple[int, int]] = set()
        with suppress(JobNotFoundError):  # it was purged
            for event in job.stream():
                if isinstance(event, RowFinished):
                    if (event.row_index, event.sample_index) in finished:
                        self.seen_twice.append((job.id, event.row_index))
                    finished.add((event.row_index, event.sample_index))


@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_jobs_end_as_they_say_whatever_users_do_while_workers_die(
    redis_server: EmbeddedRedis, tmp_path: Path, rng: random.Random
) -> None:
    connection = connect(redis_server.url)
    connection.flushall()
    with Client(redis_server.url) as api:
        users = Users(api, redis_server.url, tmp_path, rng)
        try:
            for group in users.groups:
                group.wait_for("serving", 120)
            until = time.monotonic() + DURATION_S
            while time.monotonic() < until:
                users.act()
                time.sleep(rng.random() * 0.3)
            api.resume(MODEL)
            wait_for("the end of all jobs", lambda: all(job.status().state.is_final for job in users.jobs), 300)
            for job in users.jobs:
                check(job)
            for reader in users.readers:
                reader.join(30)
                assert not reader.is_alive()
            assert users.seen_twice == []
            for_ever = [key for key in connection.scan_iter() if b"job:" in key and connection.ttl(key) == -1]
            assert for_ever == []
        finally:
            for group in users.groups:
                with group:
                    pass


def check(job: JobHandle) -> None:
    """State, counts, manifest, `_SUCCESS` and rows tell the same."""
    status = job.status()
    folder = Path(status.spec.output)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert status.state is not JobState.FAILED, status.error
    assert (manifest.state, manifest.epoch) == (status.state, status.epoch)
    assert (manifest.num_ok, manifest.num_errors) == (status.rows_ok, status.rows_error)
    assert (folder / SUCCESS).exists() == status.state.is_complete
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    rows = list(job.rows())
    indices = [row.row_index for row in rows]
    assert indices == (list(range(status.spec.num_rows)) if status.state.is_complete else sorted(set(indices)))
    assert sum(row.error is None for row in rows) == status.rows_ok
    assert all(row.text for row in rows if row.error is None)
