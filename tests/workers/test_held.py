"""Held jobs: they start after another job, or at their time, through RQ, and never wait for what can't come."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import redis
from rq.registry import DeferredJobRegistry, ScheduledJobRegistry

from minisgl_batch.client import Client, JobHandle
from minisgl_batch.errors import JobNotFoundError, JobStateError
from minisgl_jobs.connection import connect
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.keys import QueueKeys, queue_name
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.model import JobState
from minisgl_jobs.owner import OWNER
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import JobChanged
from minisgl_jobs.tasks import make_task_worker, start_id, task_queue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.workers.delivering import MODEL, Group, group

OTHER = "other"
FAR = timedelta(days=30)


@pytest.fixture
def rq_client(redis_server: EmbeddedRedis) -> redis.Redis:
    """A connection for RQ's worker, which changes its time limits."""
    return connect(redis_server.url)


def work_off_tasks(client: redis.Redis, model: str = MODEL) -> None:
    """Do all RQ tasks of a queue, as a worker group's RQ worker does."""
    make_task_worker(client, [queue_name(model)], "tasks-under-test").work(burst=True, logging_level="ERROR")


def run_job(running: Group, client: redis.Redis, *, fails: bool = False) -> None:
    """Run the next job, of one chunk, and its RQ tasks."""
    work = running.take()
    running.run(work, lambda _: fails)
    running.commit(work)
    running.tick()
    work_off_tasks(client)


def cancel(job: JobHandle, running: Group, client: redis.Redis) -> None:
    job.cancel()
    wait_for("finalise", lambda: running.tick() or job.status().state is JobState.FINALISING)
    wait_for("its task", lambda: running.tick() or len(task_queue(client, running.outbox.queue)))
    work_off_tasks(client)


def deferred(client: redis.Redis, model: str = MODEL) -> list[str]:
    found: list[str] = DeferredJobRegistry(queue=task_queue(client, queue_name(model))).get_job_ids()
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_starts_after_another_has_ended(
    api: Client, running: Group, rq_client: redis.Redis, tmp_path: Path, fails: bool
) -> None:
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    second = api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first.id)
    assert second.status().state is JobState.QUEUED
    assert second.status().waiting == f"the end of job {first.id}"
    assert deferred(rq_client) == [start_id(second.id)]
    assert running.take().job_id == first.id
    running.tick()
    assert running.queue.take() is None
    run_job(running, rq_client, fails=fails)
    assert first.status().state is (JobState.PARTIAL if fails else JobState.FINISHED)
    assert (second.status().is_held, deferred(rq_client)) == (False, [])
    run_job(running, rq_client)
    assert second.status().state is JobState.FINISHED


def test_jobs_of_other_models_and_chains_of_jobs(
    api: Client, running: Group, client: redis.Redis, rq_client: redis.Redis, tmp_path: Path
) -> None:
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    second = api.submit(["b"], model=OTHER, output=tmp_path / "2", after=first.id)
    third = api.submit(["c"], model=MODEL, output=tmp_path / "3", after=second.id)
    run_job(running, rq_client)
    assert second.status().is_held  # until its own queue's task has run
    work_off_tasks(rq_client, OTHER)
    assert (second.status().is_held, third.status().is_held) == (False, True)
    with group(client, OTHER) as others:
        work = others.take()
        others.run(work)
        others.commit(work)
        others.tick()
        work_off_tasks(rq_client, OTHER)
    work_off_tasks(rq_client)
    run_job(running, rq_client)
    assert third.status().state is JobState.FINISHED


def test_when_the_first_is_canceled_so_are_those_after_it(
    api: Client, running: Group, rq_client: redis.Redis, tmp_path: Path
) -> None:
    running.tick()  # a worker lives: nothing is ended by the client
    jobs = [api.submit(["a"], model=MODEL, output=tmp_path / "0")]
    for number in range(1, 3):
        jobs.append(api.submit(["a"], model=MODEL, output=tmp_path / str(number), after=jobs[-1].id))
    events = jobs[2].stream()
    assert next(events) == JobChanged(JobState.QUEUED)
    jobs[0].cancel()

    def all_ended() -> bool:
        running.tick()
        work_off_tasks(rq_client)
        return all(job.status().state.is_final for job in jobs)

    wait_for("the end of all", all_ended, 20)
    assert {job.status().state for job in jobs} == {JobState.CANCELED}
    assert jobs[0].status().error == ""
    for before, job in pairwise(jobs):
        assert job.status().error == f"job {before.id}, which it was to follow, was canceled"
    assert deferred(rq_client) == []
    assert list(events)[-1] == JobChanged(JobState.CANCELED)
    with pytest.raises(JobStateError, match=f"job {jobs[0].id} is canceled: nothing can follow it"):
        api.submit(["a"], model=MODEL, output=tmp_path / "9", after=jobs[0].id)
    with pytest.raises(JobNotFoundError, match="no job nothing"):
        api.submit(["a"], model=MODEL, output=tmp_path / "9", after="nothing")
    assert not (tmp_path / "9").exists()


def test_a_canceled_chain_that_no_worker_serves_ends_at_once(api: Client, client: redis.Redis, tmp_path: Path) -> None:
    jobs = [api.submit(["a"], model=MODEL, output=tmp_path / "0")]
    for number in range(1, 4):
        jobs.append(api.submit(["a"], model=MODEL, output=tmp_path / str(number), after=jobs[-1].id))
    jobs[0].cancel()
    for job in jobs:
        assert job.wait(5).state is JobState.CANCELED
    assert deferred(client) == []


def test_a_job_after_one_that_has_ended_starts_at_once(
    api: Client, running: Group, rq_client: redis.Redis, tmp_path: Path
) -> None:
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    run_job(running, rq_client)
    second = api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first.id)
    assert (second.status().is_held, deferred(rq_client)) == (False, [])
    run_job(running, rq_client)
    assert second.status().state is JobState.FINISHED


def test_a_held_job_whose_start_nobody_told_is_found(
    api: Client, client: redis.Redis, running: Group, rq_client: redis.Redis, tmp_path: Path
) -> None:
    """Its RQ task and the note of its predecessor are lost, as after a power cut."""
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    second = api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first.id)
    client.delete(running.queue.keys.job(first.id, "followers"), f"rq:job:{start_id(second.id)}")
    run_job(running, rq_client)
    assert second.status().is_held
    client.zadd(running.queue.keys.part("held"), {second.id: 1}, xx=True)  # the next look is due
    wait_for("the task", lambda: running.tick() or len(task_queue(rq_client, running.outbox.queue)))
    work_off_tasks(rq_client)
    assert not second.status().is_held
    run_job(running, rq_client)


def test_a_look_at_a_held_job_leaves_its_task_where_it_waits(
    api: Client, client: redis.Redis, running: Group, rq_client: redis.Redis, tmp_path: Path
) -> None:
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    at = datetime.now() + FAR
    jobs = [
        api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first.id),
        api.submit(["c"], model=MODEL, output=tmp_path / "3", after=first.id, start_at=at),
    ]
    held = running.queue.keys.part("held")
    for _ in range(2):
        client.zadd(held, {job.id: 1 for job in jobs}, xx=True)
        running.tick()
        assert sorted(deferred(rq_client)) == sorted(start_id(job.id) for job in jobs)
        assert all(score > time.time() * 1000 for _, score in client.zrange(held, 0, -1, withscores=True))
        assert len(task_queue(rq_client, running.outbox.queue)) == 0
    run_job(running, rq_client)
    assert [job.status().is_held for job in jobs] == [False, True]
    assert deferred(rq_client) == [start_id(jobs[1].id)]
    assert client.zscore(held, jobs[1].id) == pytest.approx(at.timestamp() * 1000, abs=2)
    jobs[1].cancel()
    run_job(running, rq_client)


def test_a_held_job_that_a_torn_write_took_out_of_its_list_is_found(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path
) -> None:
    job = api.submit(["a"], model=MODEL, output=tmp_path, start_at=datetime.now() + FAR)
    client.delete(running.queue.keys.part("held"))
    assert running.queue.audit() == 1
    assert running.queue.audit() == 0
    assert running.queue.take() is None  # the audit has not put it into its ring
    assert HeldJobs(client, running.outbox.queue).claim() == job.id
    assert HeldJobs(client, running.outbox.queue).start(job.id)
    job.cancel()
    running.end_jobs()


def test_a_job_starts_at_its_time(
    api: Client, client: redis.Redis, running: Group, rq_client: redis.Redis, tmp_path: Path
) -> None:
    running.tick()
    at = datetime.now() + FAR
    job = api.submit(["a"], model=MODEL, output=tmp_path, start_at=at)
    tasks = task_queue(rq_client, running.outbox.queue)
    assert ScheduledJobRegistry(queue=tasks).get_job_ids() == [start_id(job.id)]
    assert job.status().waiting == f"its time, {at:%Y-%m-%d %H:%M:%S}"
    assert client.ttl(running.queue.keys.part("jobs")) == -1  # it isn't forgotten meanwhile
    running.tick()
    assert running.queue.take() is None
    # Its time has come.
    past = int(time.time() * 1000) - 1
    client.hset(running.queue.keys.job(job.id), "start_ms", past)
    client.zadd(running.queue.keys.part("held"), {job.id: past}, xx=True)
    wait_for("the task", lambda: running.tick() or len(tasks))
    assert ScheduledJobRegistry(queue=tasks).get_job_ids() == []
    work_off_tasks(rq_client)
    run_job(running, rq_client)
    assert job.status().state is JobState.FINISHED


def test_a_time_that_is_over_holds_nothing(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.submit(["a"], model=MODEL, output=tmp_path, start_at=datetime.now() - FAR)
    assert not job.status().is_held
    assert running.take().job_id == job.id
    running.run(running.delivery.works[0])
    running.commit(running.delivery.works[0])
    running.end_jobs()


def test_a_job_with_a_time_waits_for_it_after_its_predecessor_too(
    api: Client, client: redis.Redis, running: Group, rq_client: redis.Redis, tmp_path: Path
) -> None:
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    at = datetime.now() + FAR
    second = api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first.id, start_at=at)
    run_job(running, rq_client)
    assert second.status().is_held
    score = client.zscore(running.queue.keys.part("held"), second.id)
    assert score == pytest.approx(at.timestamp() * 1000, abs=2)
    second.cancel()
    cancel(second, running, rq_client)
    assert second.status().state is JobState.CANCELED


def test_canceling_a_held_job_removes_its_task(
    api: Client, client: redis.Redis, running: Group, rq_client: redis.Redis, tmp_path: Path
) -> None:
    running.tick()
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    later = api.submit(["b"], model=MODEL, output=tmp_path / "2", start_at=datetime.now() + FAR)
    after = api.submit(["c"], model=MODEL, output=tmp_path / "3", after=first.id)
    for job in (later, after):
        cancel(job, running, rq_client)
        assert job.status().state is JobState.CANCELED
        assert client.exists(f"rq:job:{start_id(job.id)}") == 0
    assert deferred(rq_client) == []
    run_job(running, rq_client)
    assert after.status().state is JobState.CANCELED
    assert client.zcard(running.queue.keys.part("held")) == 0


def test_purging_a_predecessor_starts_what_waits_for_it(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path
) -> None:
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    second = api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first.id)
    work = running.take()
    running.run(work)
    running.commit(work)
    running.end_jobs()  # and nobody told the other one
    assert second.status().is_held
    first.purge()
    assert not second.status().is_held
    JobQueue(client).cancel(second.id)
    running.end_jobs()


def test_when_the_predecessor_is_gone_the_job_is_canceled(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path
) -> None:
    running.tick()
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    second = api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first.id)
    keys = QueueKeys(queue_name(MODEL))
    client.delete(*client.keys(f"{keys.job(first.id)}*"))
    client.zrem(keys.ring("normal"), first.id)
    assert not HeldJobs(client, keys.queue).start(second.id)
    running.end_jobs()
    status = second.status()
    assert (status.state, status.error) == (JobState.CANCELED, f"job {first.id}, which it was to follow, is gone")


def test_a_job_is_held_though_rq_has_no_room(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.tick()
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")

    def fail(*_: object, **__: object) -> None:
        raise redis.exceptions.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("minisgl_batch.client.client.hold", fail)
        second = api.submit(["b"], model=MODEL, output=tmp_path / "2", after=first)
    assert second.status().is_held
    assert (tmp_path / "2" / OWNER).exists()
    assert client.zscore(running.queue.keys.part("held"), second.id) is not None
    for job in (second, first):
        job.cancel()
    running.end_jobs()


def test_a_start_is_repeated_without_harm(api: Client, client: redis.Redis, running: Group, tmp_path: Path) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path, chunk_rows=1, start_at=datetime.now() + FAR)
    client.hset(running.queue.keys.job(job.id), "start_ms", 1)
    held = HeldJobs(client, running.outbox.queue)
    queue = ChunkQueue(client, MODEL, "w")
    taken = []
    for _ in range(3):
        assert not held.start(job.id)
        lease = queue.take()
        taken.append(lease.chunk if lease else None)
    assert taken == [0, 1, None]
    job.cancel()
    client.zadd(queue.keys.part("lease"), {f"{job.id}|{chunk}": 1 for chunk in (0, 1)}, xx=True)
    assert job.wait(10).state is JobState.CANCELED
