"""Every key of a job that has ended ends by itself, ours and RQ's; and purge leaves none."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.connection import connect
from minisgl_jobs.model import JobState
from minisgl_jobs.outbox import RETENTION_S
from minisgl_jobs.tasks import make_task_worker, task_queue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.workers.delivering import MODEL, Group, group


class Service:
    """A worker group and its RQ worker."""

    def __init__(self, running: Group, rq_client: redis.Redis) -> None:
        self._running = running
        self._rq_client = rq_client

    def run(self, *, fails: bool = False) -> None:
        """Run one chunk; half of its rows fail if any do."""
        work = self._running.take()
        self._running.run(work, lambda row: fails and row.row_index % 2 == 1)
        self._running.commit(work)

    def end(self, *jobs: JobHandle) -> None:
        """Let RQ end jobs."""

        def ended() -> bool:
            self._running.tick()
            if len(task_queue(self._rq_client, self._running.outbox.queue)):
                make_task_worker(self._rq_client, [self._running.outbox.queue], "tasks-under-test").work(
                    burst=True, logging_level="ERROR"
                )
            for work in self._running.delivery.stopped:
                assert work.is_stopped
            self._running.delivery.stopped.clear()
            return all(job.status().state.is_final for job in jobs)

        wait_for("the end of jobs", ended, 20)


def keys_of(client: redis.Redis, jobs: list[JobHandle]) -> dict[str, int]:
    """Key -> seconds that it has to live (-1: for ever), of all keys that belong to these jobs."""
    connection: Any = client
    names = [key.decode() for key in connection.scan_iter(count=1000)]
    return {name: connection.ttl(name) for name in names if any(job.id in name for job in jobs)}


def test_every_key_of_a_finished_job_ends_and_purge_leaves_none(
    api: Client, client: redis.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    with group(client, MODEL) as running:
        service = Service(running, connect(redis_server.url))
        finished = api.submit(["a", "b"], model=MODEL, output=tmp_path / "finished", chunk_rows=1)
        events = finished.stream()
        next(events)  # a reader leaves a watch and a stream behind
        follower = api.submit(["c"], model=MODEL, output=tmp_path / "follower", after=finished.id)
        service.run()
        service.run()
        service.end(finished)
        assert sum(1 for _ in events) > 0
        service.end()
        wait_for("the follower", lambda: not follower.status().is_held)
        service.run()
        service.end(follower)

        partial = api.submit(["a", "b"], model=MODEL, output=tmp_path / "partial")
        service.run(fails=True)
        service.end(partial)
        partial.retry()
        service.run(fails=True)
        service.end(partial)

        canceled = api.submit(["a", "b"], model=MODEL, output=tmp_path / "canceled")
        work = running.take()
        part = work.next_part()
        assert part is not None
        work.start(part)
        running.generate(work, part[0], 0)
        canceled.cancel()
        later = api.submit(["a"], model=MODEL, output=tmp_path / "later", start_at=datetime.now() + timedelta(days=9))
        later.cancel()
        service.end(canceled, later)

        jobs = [finished, follower, partial, canceled, later]
        states = [job.status().state for job in jobs]
        assert states == [
            *(JobState.FINISHED, JobState.FINISHED, JobState.PARTIAL),
            *(JobState.CANCELED, JobState.CANCELED),
        ]
        found = keys_of(client, jobs)
        assert {key: ttl for key, ttl in found.items() if not 0 < ttl <= RETENTION_S} == {}
        for kind in ("mb:", "rq:job:", "rq:results:"):
            assert any(key.startswith(kind) for key in found)
        assert len(found) > 12

        for job in jobs:
            job.purge()
        assert keys_of(client, jobs) == {}
