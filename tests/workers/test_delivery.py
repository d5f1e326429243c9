"""What a worker group does for its chunks: kept, spooled, committed once, whatever Redis, the disk or others do."""

from __future__ import annotations

import logging
import os
import random
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from minisgl_batch.client import Client
from minisgl_jobs.connection import connect
from minisgl_jobs.dataset import SUCCESS, read_dataset
from minisgl_jobs.model import JobState, Row
from minisgl_jobs.parts import write_part
from minisgl_workers import part_writer
from minisgl_workers.embedded_redis import EmbeddedRedis
from minisgl_workers.part_writer import MAX_UNCOMMITTED
from minisgl_workers.work import ChunkWork
from tests.jobs.helpers import expire, wait_for
from tests.jobs.own_server import OwnServer
from tests.workers.delivering import Group, group, part_bytes

MODEL = "some/model"


@pytest.fixture
def api(client: redis.Redis, redis_server: EmbeddedRedis) -> Iterator[Client]:
    assert client.dbsize() == 0
    with Client(redis_server.url) as made:
        yield made


@pytest.fixture
def first(client: redis.Redis) -> Iterator[Group]:
    with group(client, MODEL) as made:
        yield made


@pytest.fixture
def second(client: redis.Redis) -> Iterator[Group]:
    made = Group(client, MODEL, name="group-2")
    yield made
    made.delivery.hand_back()


def run_all(worker: Group) -> None:
    """Serve until there is nothing to take, and end the jobs."""

    def is_done() -> bool:
        worker.tick()
        for work in list(worker.delivery.works):
            worker.run(work)
        worker.end_jobs()
        return all(job.state.is_final for job in Client(url_of(worker.client)).jobs())

    wait_for("the end of all jobs", is_done, 30)


def url_of(client: redis.Redis) -> str:
    return f"unix://{client.connection_pool.connection_kwargs['path']}"


def run_some(worker: Group, work: ChunkWork, num_rows: int) -> list[Row]:
    """Generate the first rows of a chunk and spool them; returns those that are left."""
    part = work.next_part()
    assert part is not None
    work.start(part)
    for row in part[:num_rows]:
        worker.generate(work, row, 0)

    def is_spooled() -> bool:
        worker.delivery.tick(worker.info, take=False)
        return not work.unspooled

    wait_for("the spool", is_spooled)
    return part[num_rows:]


# ------------------------------------------------------------------- rows


def test_rows_out_are_rows_in_for_any_chunk_size_also_when_prompts_repeat(
    api: Client, first: Group, tmp_path: Path, rng: random.Random
) -> None:
    for number in range(4):
        prompts = [rng.choice("abc") for _ in range(rng.randrange(1, 40))]
        folder = tmp_path / str(number)
        api.submit(prompts, model=MODEL, output=folder, chunk_rows=rng.randrange(1, 45))
        run_all(first)
        table = read_dataset(folder)
        assert table["row_index"].to_pylist() == list(range(len(prompts)))
        assert [text[0] for text in table["text"].to_pylist()] == prompts


def test_a_chunk_that_is_taken_over_starts_from_its_spooled_rows(
    client: redis.Redis, api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    api.submit(list("abcdef"), model=MODEL, output=tmp_path)
    work = first.take()
    run_some(first, work, 4)
    expire(client, first.queue, work.lease)
    run_all(second)
    assert second.ran == [(4, 0), (5, 0)]
    assert read_dataset(tmp_path)["text"].to_pylist() == [f"{prompt} 0 in epoch 0" for prompt in "abcdef"]
    first.keeper.renew()
    first.tick()
    assert first.delivery.stopped == [work]


def test_a_drained_group_hands_back_its_chunk_with_the_finished_rows(
    api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    job = api.submit(list("abcdef"), model=MODEL, output=tmp_path, chunk_rows=3)
    complete = first.take()
    first.run(complete)
    first.delivery.hand_back()  # a complete chunk is committed
    assert job.status().rows_ok == 3
    run_some(second, second.take(), 1)
    second.delivery.hand_back()
    third = Group(first.client, MODEL, name="group-3")
    run_all(third)
    assert third.ran == [(4, 0), (5, 0)]
    assert job.status().num_deaths == 0
    third.delivery.hand_back()


def test_a_committed_chunk_that_redis_has_lost_is_not_generated_again(
    client: redis.Redis, api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    job = api.submit(list("abcd"), model=MODEL, output=tmp_path, chunk_rows=2)
    work = first.take()
    first.run(work)
    before = [(key, max(0, client.pttl(key)), client.dump(key)) for key in client.scan_iter()]
    first.commit(work)
    client.flushall()
    for saved in before:
        client.restore(*saved)
    expire(client, first.queue, work.lease)
    run_all(second)
    assert second.ran == [(2, 0), (3, 0)]
    assert (job.status().state, job.status().rows_ok) == (JobState.FINISHED, 4)
    assert read_dataset(tmp_path)["row_index"].to_pylist() == [0, 1, 2, 3]


# ----------------------------------------------------------------- leases


def test_a_paused_worker_cannot_count_its_chunk_again(
    client: redis.Redis, api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path)
    work = first.take()
    first.run(work)
    expire(client, first.queue, work.lease)  # the first group is stopped here,
    run_all(second)
    parts = part_bytes(tmp_path)
    first.tick()  # and goes on
    wait_for("the second commit", lambda: first.tick() or not first.delivery.works)
    assert first.delivery.stopped == [work]
    assert (job.status().rows_ok, job.status().rows_error) == (2, 0)
    assert part_bytes(tmp_path) == parts
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".part")]


def test_leases_are_renewed_while_the_group_is_busy(client: redis.Redis, api: Client, tmp_path: Path) -> None:
    busy = Group(client, MODEL, lease_s=0.6)
    other = Group(client, MODEL, name="group-2", lease_s=0.6)
    api.submit(["a", "b"], model=MODEL, output=tmp_path, chunk_rows=2)
    work = busy.take()
    busy.keeper.start()
    until = time.monotonic() + 2
    while time.monotonic() < until:  # the group's main thread does nothing for its lease
        assert other.queue.take() is None
    assert busy.delivery.holds(work)
    run_all(busy)
    for worker in (busy, other):
        worker.delivery.hand_back()


def test_a_worker_that_was_stopped_past_its_lease_starts_no_row(
    client: redis.Redis, api: Client, tmp_path: Path
) -> None:
    stopped = Group(client, MODEL, lease_s=0.3)
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path)
    work = stopped.take()
    assert stopped.delivery.holds(work)
    wait_for("the end of the lease", lambda: not stopped.delivery.holds(work))
    stopped.keeper.renew()  # nobody has taken it meanwhile
    assert stopped.delivery.holds(work)
    job.cancel()
    stopped.keeper.renew()
    stopped.give_up(work)
    assert not stopped.delivery.holds(work)
    stopped.end_jobs()
    stopped.delivery.hand_back()


def test_a_worker_that_goes_on_after_a_pause_learns_at_once_whose_its_chunk_is(
    client: redis.Redis, api: Client, second: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_workers.lease_keeper.RENEW_S", 60.0)
    stopped = Group(client, MODEL, lease_s=180)
    api.submit(["a", "b"], model=MODEL, output=tmp_path)
    work = stopped.take()
    stopped.keeper.add(work.lease, time.monotonic() - 181)  # so long ago
    expire(client, stopped.queue, work.lease)
    run_all(second)
    stopped.keeper.start()
    wait_for("the loss", lambda: stopped.tick() or stopped.delivery.stopped == [work])
    stopped.delivery.hand_back()


# ------------------------------------------------------------- Redis away


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with OwnServer(tmp_path_factory.mktemp("redis")) as own:
        yield own


def test_finished_rows_wait_while_redis_is_away_and_are_spooled_again_when_it_may_have_lost_some(
    server: OwnServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = connect(server.url)
    worker = Group(client, MODEL)
    job = Client(server.url).submit(list("abcdef"), model=MODEL, output=tmp_path, chunk_rows=4)
    work = worker.take()
    left = run_some(worker, work, 2)
    worker.keeper.renew()
    assert job.status().num_spooled == 2
    num_works = len(worker.delivery.works)
    server.kill()
    worker.generate(work, left[0], 0)
    wait_for("a look at Redis", lambda: worker.tick() or "no chunk is taken" in caplog.text)
    assert len(work.unspooled) == 1
    assert len(worker.delivery.works) == num_works
    server.start()
    client.delete(worker.queue.keys.spool(job.id, work.lease.chunk))  # as after a power loss
    wait_for("Redis", lambda: worker.tick() or "Redis is back" in caplog.text)
    worker.keeper.renew()
    wait_for("all rows in the spool", lambda: worker.tick() or job.status().num_spooled == 3)
    worker.delivery.hand_back()


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
    run_all(worker)
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
    run_all(worker)
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


def test_a_slow_disk_bounds_what_waits_in_memory(
    api: Client, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def slow(*args: Any) -> Any:
        assert may_write.wait(60)
        return write_part(*args)

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
    run_all(worker)
    assert len(worker.ran) == 40
    worker.delivery.hand_back()


def test_a_canceled_job_does_not_wait_for_chunks_that_can_not_be_written(
    api: Client, client: redis.Redis, tmp_path: Path
) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path / "out", chunk_rows=2)
    with group(client, MODEL) as worker:
        work = worker.take()
        worker.run(work)
        (tmp_path / "out").rename(tmp_path / "away")
        (tmp_path / "out").touch()
        wait_for("the refusal", lambda: worker.tick() or worker.delivery.trouble)
        assert "out/.part-0-000000" in worker.delivery.trouble
        wait_for("heartbeat", lambda: worker.tick() or api.workers())
        job.cancel()
        worker.give_up(work)
        assert worker.delivery.trouble == ""
        assert job.status().state is JobState.FINALISING
        (tmp_path / "out").unlink()
        (tmp_path / "away").rename(tmp_path / "out")
        worker.end_jobs()
    assert read_dataset(tmp_path / "out")["row_index"].to_pylist() == [0, 1]
