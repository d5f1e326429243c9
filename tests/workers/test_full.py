"""A full Redis or disk: intake stops, what is under way stays, and all goes on by itself when there is room."""

from __future__ import annotations

import logging
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from minisgl_batch.client import Client
from minisgl_batch.errors import OutputError
from minisgl_jobs.dataset import SUCCESS, read_dataset
from minisgl_jobs.model import JobState
from minisgl_jobs.parts import write_part
from minisgl_workers import loading, part_writer
from minisgl_workers.part_writer import MAX_UNCOMMITTED
from tests.jobs.helpers import wait_for
from tests.workers.delivering import MODEL, Group, group


def test_a_full_redis_stops_intake_drains_and_loses_nothing(
    api: Client, client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Group(client, MODEL, low_water=3)
    job = api.submit([str(i) for i in range(10)], model=MODEL, output=tmp_path, chunk_rows=2)
    worker.take()
    client.config_set("maxmemory", 1)
    try:
        work = worker.delivery.works[0]
        part = work.next_part()
        assert part is not None
        work.start(part)
        worker.generate(work, part[0], 0)
        wait_for("a refused spool", lambda: worker.tick() or "takes no more data" in caplog.text)
        num_begun = len(job.status().leases)
        worker.generate(work, part[1], 0)
        wait_for("the commit of what is under way", lambda: worker.tick() or job.status().rows_ok == 2)
        assert len(job.status().leases) == num_begun - 1  # and nothing new was begun
        for left in list(worker.delivery.works):
            worker.run(left)
        wait_for("another chunk", lambda: worker.tick() or worker.delivery.works)  # nothing waits in memory now
    finally:
        client.config_set("maxmemory", 0)
    assert caplog.text.count("takes no more data") == 1
    worker.run_all()
    assert read_dataset(tmp_path)["row_index"].to_pylist() == list(range(10))
    assert len(worker.ran) == 10
    worker.delivery.hand_back()


# -------------------------------------------------------------- disk full


@contextmanager
def limited_file_size(_: Path) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def full_file_system(folder: Path) -> Iterator[None]:
    hog = folder / "hog"
    command = ["dd", "if=/dev/zero", f"of={hog}"]
    assert b"No space left" in subprocess.run(command, capture_output=True, check=False).stderr
    yield
    hog.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_full_disk(
    api: Client,
    worker: Group,
    folder: Path,
    full: Callable[[Path], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part_writer, "RETRY_S", 0.2)
    job = api.submit([str(i) for i in range(12)], model=MODEL, output=folder / "out", chunk_rows=2)
    wait_for("two chunks", lambda: worker.tick() or len(worker.delivery.works) >= 2)
    caplog.set_level(logging.INFO)
    with full(folder):
        complete = list(worker.delivery.works)
        for work in complete:
            worker.run(work)
        wait_for("the refusal", lambda: worker.tick() or "no chunk is taken" in caplog.text)
        held = len(job.status().leases)
        until = time.monotonic() + 0.6  # longer than between two tries
        while time.monotonic() < until:
            worker.tick()
        assert len(worker.delivery.works) == len(job.status().leases) == held < 6
        assert job.status().rows_ok == 0
        assert job.status().num_spooled == 2 * len(complete)  # safe meanwhile
        assert "KiB are needed" in caplog.text or "File too large" in caplog.text
    assert caplog.text.count("no chunk is taken until") == 1
    worker.run_all()
    assert "there is room again" in caplog.text
    assert read_dataset(folder / "out")["row_index"].to_pylist() == list(range(12))
    assert len(worker.ran) == 12
    assert (folder / "out" / SUCCESS).exists()
    assert job.status().state is JobState.FINISHED


def test_a_full_disk_pauses_intake_says_what_is_needed_and_goes_on_by_itself(
    api: Client,
    client: redis.Redis,
    small_disk: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Group(client, MODEL, low_water=3)
    check_full_disk(api, worker, small_disk, full_file_system, caplog, monkeypatch)
    worker.delivery.hand_back()


def test_a_limit_on_files_pauses_intake_as_a_full_disk_does(
    api: Client,
    client: redis.Redis,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Group(client, MODEL, low_water=3)
    check_full_disk(api, worker, tmp_path, limited_file_size, caplog, monkeypatch)
    worker.delivery.hand_back()


def test_another_job_says_what_it_waits_for(
    api: Client, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OutputError("/full is full")

    monkeypatch.setattr(part_writer, "RETRY_S", 0.1)
    worker = Group(client, MODEL)
    api.submit(["a"], model=MODEL, output=tmp_path / "full")
    with monkeypatch.context() as patch:
        patch.setattr(part_writer, "write_part", refuse)
        worker.run(worker.take())
        wait_for("the trouble", lambda: worker.tick() or worker.delivery.trouble)
        other = api.submit(["b"], model=MODEL, output=tmp_path / "other")

        def waiting() -> str:
            worker.info = msgspec.structs.replace(worker.info, trouble=worker.delivery.trouble)
            worker.delivery._due["heartbeat"] = 0.0
            worker.delivery.tick(worker.info, take=False)  # the other job isn't to be taken before the error
            return other.status().waiting

        assert wait_for("the reason", waiting) == "group-1 takes no chunks: /full is full"
    worker.info = msgspec.structs.replace(worker.info, trouble="")
    worker.run_all()
    worker.delivery.hand_back()


def test_a_slow_disk_bounds_what_waits_in_memory(
    api: Client, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        assert may_write.wait(60)
        return write_part(*args, **options)

    monkeypatch.setattr(part_writer, "write_part", slow)
    worker = Group(client, MODEL)
    api.submit([str(i) for i in range(40)], model=MODEL, output=tmp_path, chunk_rows=2)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        worker.tick()
        for work in list(worker.delivery.works):
            worker.run(work)
    assert len(worker.delivery.works) == MAX_UNCOMMITTED
    may_write.set()
    worker.run_all()
    assert len(worker.ran) == 40
    worker.delivery.hand_back()


def test_a_canceled_job_does_not_wait_for_chunks_that_can_not_be_written(
    api: Client, client: redis.Redis, tmp_path: Path
) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path / "out", chunk_rows=2)
    with group(client, MODEL) as worker:
        work = worker.take()
        worker.run(work)
        with limited_file_size(tmp_path):
            wait_for("the refusal", lambda: worker.tick() or worker.delivery.trouble)
            assert "out/.part-0-000000" in worker.delivery.trouble
            wait_for("heartbeat", lambda: worker.tick() or api.workers())
            job.cancel()
            worker.give_up(work)
            assert worker.delivery.trouble == ""
            assert job.status().state is JobState.FINALISING
        worker.end_jobs()
    assert read_dataset(tmp_path / "out")["row_index"].to_pylist() == [0, 1]


def test_a_job_whose_folder_can_not_be_written_here_is_left_to_others_and_the_next_one_goes_on(
    api: Client, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "FIRST_PAUSE_S", 0.3)
    bad = api.submit(["a", "b", "c"], model=MODEL, output=tmp_path / "bad", chunk_rows=2)
    shutil.rmtree(tmp_path / "bad")
    (tmp_path / "bad").touch()  # a file where the folder was
    with group(client, MODEL) as worker:

        def serve() -> None:
            worker.tick()
            for work in list(worker.delivery.works):
                worker.run(work)
            worker.end_jobs()

        wait_for("the job to be passed on", lambda: serve() or "can't be written" in bad.status().blocked)
        good = api.submit(["d"], model=MODEL, output=tmp_path / "good")
        wait_for("the other job", lambda: serve() or good.status().state is JobState.FINISHED)
        assert bad.status().state is JobState.RUNNING
        (tmp_path / "bad").unlink()
        wait_for("the first one", lambda: serve() or bad.status().state is JobState.FINISHED)
        assert sorted(worker.ran) == [(0, 0), (0, 0), (1, 0), (2, 0)]  # row 0 of both, and none twice
    assert read_dataset(tmp_path / "bad")["row_index"].to_pylist() == [0, 1, 2]
    assert bad.status().num_deaths == 0
