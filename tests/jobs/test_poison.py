"""Rows that kill their worker: counted, narrowed down, and given up without the others."""

from __future__ import annotations

import random

import pytest
import redis

from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue, Commit, Lease
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from tests.jobs.helpers import MODEL, end, end_all, expire, make_spec, submit, taken, worker


@pytest.fixture
def queue(client: redis.Redis) -> JobQueue:
    return JobQueue(client)


def test_a_poison_row_is_narrowed_down_and_given_up_and_the_others_finish(
    client: redis.Redis, queue: JobQueue, rng: random.Random
) -> None:
    """By workers that follow the rules: solo chunks in sixteenths of the suspect range, each announced first."""
    spec = submit(queue, make_spec(num_rows=256, chunk_rows=256))
    poison = rng.sample(range(256), 2)
    num_deaths = 0
    while True:
        group = worker(client, f"w{num_deaths}")
        lease = taken(group)
        assert lease.num_deaths == num_deaths
        if _survives(group, lease, poison):
            break
        num_deaths += 1
        assert num_deaths < 30
        expire(client, group, lease)
    assert set(lease.lost_rows) == set(poison)
    assert set(queue.spooled(spec.job_id, 0)) == {(row, 0) for row in range(256) if row not in poison}
    # Two rows share the first two deaths; each then costs one to find its sixteenth and two alone.
    assert num_deaths <= 2 + 2 * 3
    assert queue.status(spec.job_id).num_deaths == num_deaths
    assert group.complete(lease, rows_ok=254, rows_error=2) is Commit.COMMITTED
    assert client.exists(group.keys.job(spec.job_id, "poison")) == 0
    end_all(Outbox(client, queue_name(MODEL)))


def _survives(group: ChunkQueue, lease: Lease, poison: list[int]) -> bool:
    """Run a chunk as a worker does; False when it dies of a poison row."""
    todo = [row for row in lease.rows if (row, 0) not in lease.spooled and row not in lease.lost_rows]
    if not lease.is_solo:
        return not set(todo) & set(poison)
    ranges = [lease.suspect] if lease.suspect else []
    for rows in [*ranges, lease.rows]:
        step = max(1, len(rows) // 16)
        for start in range(rows.start, rows.stop, step):
            part = range(start, min(start + step, rows.stop))
            running = [row for row in part if row in todo]
            if not running:
                continue
            assert group.probe(lease, part)
            if set(running) & set(poison):
                return False
            assert group.spool(lease, {(row, 0): b"done" for row in running}, num_rows=1)
            todo = [row for row in todo if row not in running]
    return True


def test_deaths_are_counted_at_takeover_only(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    group = worker(client)
    lease = taken(group)
    for _ in range(3):
        group.renew([lease])
        group.handback([lease])
        lease = taken(group)
    assert lease.num_deaths == 0
    for deaths in (1, 2):
        expire(client, group, lease)
        lease = taken(group)
        assert (lease.num_deaths, lease.is_solo) == (deaths, deaths == 2)
    end(client, lease)


def test_a_drained_probe_accuses_nobody(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    group = worker(client)
    lease = taken(group)
    group.probe(lease, range(2, 3))
    group.handback([lease])
    lease = taken(group)
    expire(client, group, lease)
    lease = taken(group)
    assert (lease.num_deaths, lease.suspect) == (1, None)
    group.probe(lease, range(1, 3))
    expire(client, group, lease)
    lease = taken(group)
    assert lease.suspect == range(1, 3)
    end(client, lease)
