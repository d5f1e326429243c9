"""Whose turn it is: fairness between jobs, priorities, and chunks that come back."""

from __future__ import annotations

import pytest
import redis

from minisgl_jobs.model import Priority
from minisgl_jobs.queue import JobQueue
from tests.jobs.helpers import end, expire, make_spec, submit, taken, wait_for, worker


@pytest.fixture
def queue(client: redis.Redis) -> JobQueue:
    return JobQueue(client)


def test_jobs_of_one_priority_take_turns(client: redis.Redis, queue: JobQueue) -> None:
    ids = [submit(queue, make_spec(num_rows=20, chunk_rows=1)).job_id for _ in range(3)]
    order = [taken(worker(client)).spec.job_id for _ in range(35)]
    assert set(order[:5]) == set(ids)  # every second take went to a new one
    assert all(set(order[i : i + 3]) == set(ids) for i in range(5, 35, 3))
    for job_id in ids:
        queue.cancel(job_id)


def test_a_small_job_starts_within_two_chunks_of_a_big_one(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=100_000, chunk_rows=256, job_id="big"))
    group = worker(client)
    for _ in range(5):
        taken(group)
    submit(queue, make_spec(num_rows=20, chunk_rows=256, job_id="small"))
    assert "small" in [taken(group).spec.job_id for _ in range(2)]
    queue.cancel("big")
    queue.cancel("small")


def test_a_flood_of_small_jobs_does_not_hold_back_a_big_one(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=1000, chunk_rows=1, job_id="big"))
    group = worker(client)
    taken(group)
    order = []
    for _ in range(40):
        for _ in range(2):  # new ones come faster than they are served
            submit(queue, make_spec(num_rows=1, chunk_rows=1))
        order.append(taken(group).spec.job_id)
    assert order.count("big") == 20
    assert len(set(order)) == 21
    for status in queue.jobs(limit=1000):
        queue.cancel(status.job_id)


def test_a_job_of_another_release_does_not_hold_back_new_ones(client: redis.Redis, queue: JobQueue) -> None:
    foreign = submit(queue, make_spec(num_rows=2, chunk_rows=1)).job_id
    group = worker(client)
    taken(group)
    client.hset(group.keys.job(foreign), "schema", "99")
    spec = submit(queue, make_spec(num_rows=1, chunk_rows=1))
    assert taken(group).spec == spec
    for job_id in (foreign, spec.job_id):
        queue.cancel(job_id)


def test_new_jobs_are_served_in_order_of_arrival(client: redis.Redis, queue: JobQueue) -> None:
    specs = [submit(queue, make_spec(num_rows=1, chunk_rows=1)) for _ in range(5)]
    leases = [taken(worker(client)) for _ in specs]
    assert [lease.spec for lease in leases] == specs
    end(client, *leases)


def test_priorities_are_served_in_order(client: redis.Redis, queue: JobQueue) -> None:
    for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH):
        submit(queue, make_spec(num_rows=2, chunk_rows=1, priority=priority))
    leases = [taken(worker(client)) for _ in range(6)]
    assert [lease.spec.priority.value for lease in leases] == ["high"] * 2 + ["normal"] * 2 + ["low"] * 2
    end(client, *leases)


def test_a_dead_workers_chunk_comes_before_new_ones_of_any_priority(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=2, chunk_rows=1, priority=Priority.LOW, job_id="low"))
    group = worker(client)
    lost = taken(group)
    submit(queue, make_spec(num_rows=1, chunk_rows=1, priority=Priority.HIGH))
    expire(client, group, lost)
    assert taken(group).spec.job_id == "low"
    for status in queue.jobs():
        queue.cancel(status.job_id)


def test_a_handed_back_chunk_is_the_next_of_its_job_and_no_death(client: redis.Redis, queue: JobQueue) -> None:
    spec = submit(queue, make_spec(num_rows=6, chunk_rows=2))
    group = worker(client)
    first, second = taken(group), taken(group)
    group.spool(first, {(1, 0): b"kept"}, num_rows=1)
    group.handback([second, first])
    again = [taken(group) for _ in range(3)]
    assert [lease.chunk for lease in again] == [0, 1, 2]
    assert again[0].spooled == {(1, 0): b"kept"}
    assert [lease.num_deaths for lease in again] == [0, 0, 0]
    assert queue.status(spec.job_id).num_deaths == 0
    end(client, *again)


def test_jobs_that_a_worker_avoids_keep_their_turn(client: redis.Redis, queue: JobQueue) -> None:
    """Neither new nor old ones, nor those whose worker died, go to it; others get them as if nothing had been asked."""
    group, other = worker(client, "w1"), worker(client, "w2")
    first, second = (submit(queue, make_spec(num_rows=12, chunk_rows=4)) for _ in range(2))
    lost = taken(other)
    assert lost.spec.job_id == first.job_id
    expire(client, other, lost)
    leases = [group.take(avoid=[first.job_id]) for _ in range(4)]
    assert [lease and lease.spec.job_id for lease in leases] == [second.job_id] * 3 + [None]
    assert group.take(avoid=[first.job_id, second.job_id]) is None
    takeover = wait_for("the takeover", lambda: group.take())
    assert (takeover.spec.job_id, takeover.chunk) == (first.job_id, lost.chunk)
    rest = [taken(group), taken(group)]
    assert [lease.spec.job_id for lease in rest] == [first.job_id] * 2
    end(client, takeover, *rest, *(lease for lease in leases if lease is not None))
