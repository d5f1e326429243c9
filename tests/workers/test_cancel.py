"""Cancel: seen at once, rows stop, finished ones stay, and no job waits for its end when its workers are gone."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import redis

from minisgl_batch.client import Client
from minisgl_batch.errors import OutputError
from minisgl_jobs.dataset import MANIFEST, SUCCESS, read_dataset
from minisgl_jobs.keys import QueueKeys, queue_name
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.model import JobState, RowResult
from minisgl_jobs.owner import OWNER
from minisgl_jobs.parts import part_name
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import JobChanged
from minisgl_jobs.spool import encode_result
from minisgl_workers.embedded_redis import EmbeddedRedis
from minisgl_workers.work import ChunkWork
from tests.jobs.helpers import expire, taken, wait_for
from tests.workers.delivering import MODEL, Group
from tests.workers.echo_group import MODEL as ECHO
from tests.workers.echo_group import start_echo_group
from tests.workers.echo_rank import EchoConfig


def leave(client: redis.Redis) -> None:
    """All registrations of workers end, as after their deaths."""
    client.delete(QueueKeys(queue_name(MODEL)).part("workers"))


def commit_without_rename(running: Group, work: ChunkWork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a chunk whose worker dies after the commit."""

    has_failed = threading.Event()

    def fail(*_: object, **__: object) -> None:
        has_failed.set()
        raise OutputError("as the test wishes")

    running.run(work)
    with monkeypatch.context() as patch:
        patch.setattr("minisgl_workers.part_writer.commit_part", fail)
        running.commit(work, is_renamed=False)
        assert has_failed.wait(10)


def manifest(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / MANIFEST).read_text())
    return found


def test_cancel_keeps_finished_rows_and_ends_as_canceled(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.submit([str(i) for i in range(6)], model=MODEL, output=tmp_path, chunk_rows=3)
    first = running.take()
    running.run(first)
    running.commit(first)
    second = running.take()
    part = second.next_part()
    assert part is not None
    second.start(part)
    running.generate(second, part[0], 0)  # not spooled yet
    job.cancel()
    assert job.status().state is JobState.CANCELING
    running.give_up(second)
    running.end_jobs()
    status = job.status()
    assert (status.state, status.rows_ok, status.rows_error) == (JobState.CANCELED, 4, 0)
    assert read_dataset(tmp_path)["row_index"].to_pylist() == [0, 1, 2, 3]
    found = manifest(tmp_path)
    assert (found["state"], found["num_ok"], found["num_rows"]) == ("canceled", 4, 6)
    assert not (tmp_path / SUCCESS).exists()


def test_a_reader_sees_a_cancel_at_once_though_no_worker_hears_of_it(
    api: Client, running: Group, tmp_path: Path
) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path)
    events = job.stream()
    assert next(events) == JobChanged(JobState.QUEUED)
    work = running.take()
    assert next(events) == JobChanged(JobState.RUNNING)
    job.cancel()
    assert next(events) == JobChanged(JobState.CANCELING)
    assert running.delivery.works == [work]
    running.give_up(work)
    running.end_jobs()
    assert list(events)[-1] == JobChanged(JobState.CANCELED)


def test_rows_of_a_canceled_job_stop_within_two_engine_steps(
    api: Client, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    engine = EchoConfig(step_s=0.1, steps=str(steps))
    with start_echo_group(redis_server.url, engine=engine) as processes:
        processes.wait_for("serving", 60)
        job = api.submit(["a", "b", "c"], model=ECHO, output=tmp_path / "out", max_tokens=1500)
        wait_for("some steps", lambda: steps.exists() and len(steps.read_text().splitlines()) > 3, 30)
        called = time.monotonic()
        job.cancel()
        assert job.wait(30).state is JobState.CANCELED
        # The engine has nothing else to do; were it still at work, there would be a step every 0.1 s.
        taken = [float(line.split()[0]) for line in steps.read_text().splitlines()]
        assert sum(at > called for at in taken) <= 2


def test_a_complete_chunk_of_a_canceled_job_is_committed(api: Client, running: Group, tmp_path: Path) -> None:
    """It was complete, and not spooled for that reason, when the cancel came."""
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path, chunk_rows=1)
    work = running.take()
    running.run(work)
    job.cancel()
    running.commit(work)
    running.end_jobs()
    assert (job.status().state, job.status().rows_ok) == (JobState.CANCELED, 1)
    assert read_dataset(tmp_path)["row_index"].to_pylist() == [0]


def test_a_canceled_job_that_no_worker_serves_ends_at_once(api: Client, tmp_path: Path) -> None:
    job = api.submit(["a"], model=MODEL, output=tmp_path / "out")
    job.cancel()
    assert job.status().state is JobState.CANCELED
    assert manifest(tmp_path / "out")["state"] == "canceled"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {MANIFEST}
    api.submit(["a"], model=MODEL, output=tmp_path / "out", overwrite=True).cancel()


def test_an_unserved_job_with_a_damaged_record_in_redis_ends(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path
) -> None:
    job = api.submit(["a"], model=MODEL, output=tmp_path / "out")
    work = running.take()
    running.run(work)
    running.commit(work)
    client.hset(QueueKeys(queue_name(MODEL)).job(job.id, "renames"), "0", "x/../../secret 0")
    leave(client)
    assert job.wait(10).state is JobState.FAILED
    assert "record in Redis is damaged" in job.status().error
    job.purge(output=True)


def test_an_unserved_job_whose_folder_is_elsewhere_ends_without_one(api: Client, tmp_path: Path) -> None:
    job = api.submit(["a"], model=MODEL, output=tmp_path / "out")
    (tmp_path / "out" / OWNER).unlink()
    (tmp_path / "out").rmdir()
    job.cancel()
    assert job.status().state is JobState.CANCELED
    assert not (tmp_path / "out").exists()


def test_a_job_whose_workers_have_died_is_canceled_with_its_finished_rows(
    api: Client, client: redis.Redis, tmp_path: Path
) -> None:
    job = api.submit([str(i) for i in range(6)], model=MODEL, output=tmp_path, chunk_rows=3)
    dead = ChunkQueue(client, MODEL, "dead")
    lease = taken(dead)
    dead.spool(lease, {(1, 0): encode_result(RowResult(1, text="one", seed=1))}, num_rows=1)
    job.cancel()
    assert job.status().state is JobState.CANCELING  # its lease may be alive
    expire(client, dead, lease)
    assert job.wait(10).state is JobState.CANCELED
    assert read_dataset(tmp_path)["text"].to_pylist() == ["one"]
    assert job.status().rows_ok == 1


@pytest.mark.parametrize("canceled", [True, False])
def test_parts_on_another_machine_are_not_given_up(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path, canceled: bool
) -> None:
    """The client sees a folder of the right name, but not what the workers wrote: it must leave the job alone."""
    folder = tmp_path / "out"
    job = api.submit(["a", "b"], model=MODEL, output=folder, chunk_rows=1)
    for _ in range(1 if canceled else 2):
        work = running.take()
        running.run(work)
        running.commit(work)
    leave(client)
    (folder / part_name(0)).rename(tmp_path / "elsewhere")
    if canceled:
        job.cancel()
    for progress in job.watch(0.0):
        assert progress.state is JobState.FINALISING
        break
    assert job.status().state is JobState.FINALISING
    (tmp_path / "elsewhere").rename(folder / part_name(0))
    leave(client)
    assert job.wait(10).state is (JobState.CANCELED if canceled else JobState.FINISHED)


def test_waiting_finalises_what_the_last_worker_left(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = api.submit(["a"], model=MODEL, output=tmp_path)
    commit_without_rename(running, running.take(), monkeypatch)
    leave(client)
    assert not (tmp_path / part_name(0)).exists()
    assert job.wait(10).state is JobState.FINISHED
    assert (tmp_path / SUCCESS).exists()


def test_finished_rows_of_a_chunk_that_was_handed_back_can_be_read(api: Client, running: Group, tmp_path: Path) -> None:
    """As after the drain of the only worker: nobody has the chunk, and some of its rows are finished."""
    job = api.submit(["a", "b", "c"], model=MODEL, output=tmp_path)
    work = running.take()
    part = work.next_part()
    assert part is not None
    work.start(part)
    running.generate(work, part[1], 0)
    running.delivery.hand_back()
    assert [row.row_index for row in job.rows(partial=True)] == [1]
    progress = job.progress()
    assert (progress.rows_done, progress.status.num_spooled, progress.status.leases) == (1, 1, ())
    job.cancel()
    assert job.wait(10).rows_ok == 1


def test_a_reader_ends_a_job_that_its_workers_left(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_jobs.reader.LOOK_S", 0.05)
    job = api.submit(["a"], model=MODEL, output=tmp_path)
    events = job.stream()
    assert next(events) == JobChanged(JobState.QUEUED)
    commit_without_rename(running, running.take(), monkeypatch)
    leave(client)
    assert list(events)[-1] == JobChanged(JobState.FINISHED)
    assert (tmp_path / SUCCESS).exists()


def test_cancel_may_be_repeated_and_raced(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path)
    work = running.take()
    for _ in range(3):
        job.cancel()
    running.give_up(work)
    job.cancel()
    running.end_jobs()
    job.cancel()
    assert job.status().state is JobState.CANCELED
    assert JobQueue(running.client).jobs()[0].state is JobState.CANCELED
    wait_for("no chunk", lambda: running.queue.take() is None)


def test_a_worker_that_died_before_its_rename_loses_no_row_of_a_canceled_job(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path, chunk_rows=1)
    commit_without_rename(running, running.take(), monkeypatch)
    leave(client)
    job.cancel()
    assert job.status().state is JobState.CANCELED
    assert read_dataset(tmp_path).num_rows == 1
