"""Small jobs for tests of the queue."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import redis

from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue, Commit, Lease
from minisgl_jobs.model import JobSpec, JobState, Priority
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue

MODEL = "test/model"
T = TypeVar("T")
_numbers = itertools.count()


def make_spec(
    num_rows: int = 8,
    chunk_rows: int = 4,
    *,
    job_id: str = "",
    priority: Priority = Priority.NORMAL,
    output: str = "/nowhere",
    model: str = MODEL,
) -> JobSpec:
    job_id = job_id or f"job-{next(_numbers)}"
    return JobSpec(job_id, model, num_rows, chunk_rows, output, priority=priority, submitted_at=1.5)


def payload(spec: JobSpec, chunk: int) -> bytes:
    return f"{spec.job_id} chunk {chunk}".encode()


def submit(queue: JobQueue, spec: JobSpec, *, start_at: float = 0.0) -> JobSpec:
    queue.create(spec)
    queue.append(spec, {chunk: payload(spec, chunk) for chunk in range(spec.num_chunks)})
    queue.seal(spec, start_at=start_at)
    return spec


def taken(queue: ChunkQueue) -> Lease:
    """A chunk, which must be there."""
    lease = queue.take()
    assert lease is not None, "there is no chunk to take"
    return lease


def complete(queue: ChunkQueue, lease: Lease, rows_error: int = 0) -> Commit:
    return queue.complete(lease, rows_ok=len(lease.rows) - rows_error, rows_error=rows_error)


def end_all(outbox: Outbox) -> None:
    """Give every job in the outbox its last state."""
    while (claim := outbox.claim(60)) is not None:
        job = outbox.load(claim.job_id, claim.epoch)
        assert job is not None
        done = JobState.PARTIAL if job.rows_error else JobState.FINISHED
        assert outbox.finish(claim.job_id, claim.epoch, JobState.CANCELED if job.is_canceled else done)


def wait_for(what: str, check: Callable[[], T], timeout_s: float = 10.0) -> T:
    """Poll until `check` answers something true; fails with `what` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (answer := check()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)
    return answer


def worker(client: redis.Redis, name: str = "w1", lease_s: float = 15.0) -> ChunkQueue:
    return ChunkQueue(client, MODEL, name, lease_s=lease_s)


def expire(client: redis.Redis, queue: ChunkQueue, lease: Lease) -> None:
    """Let the lease be over, as if its worker had been silent."""
    member = f"{lease.spec.job_id}|{lease.chunk}"
    assert client.zadd(queue.keys.part("lease"), {member: 1}, xx=True, ch=True) == 1


def end(client: redis.Redis, *leases: Lease) -> None:
    """Commit these chunks and end the jobs that this completes."""
    for lease in leases:
        assert complete(worker(client, "last"), lease) is Commit.COMMITTED
    end_all(Outbox(client, queue_name(MODEL)))
