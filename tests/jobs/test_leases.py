"""Chunks as worker groups see them: expiry, takeover, grace, calls that come twice, spools, the bell."""

from __future__ import annotations

import random
import secrets
import threading
import time

import pytest
import redis

from minisgl_jobs.connection import connect
from minisgl_jobs.leases import Commit, Lease, Renewal
from minisgl_jobs.queue import JobQueue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import complete, end, expire, make_spec, submit, taken, wait_for, worker


@pytest.fixture
def queue(client: redis.Redis) -> JobQueue:
    return JobQueue(client)


def test_a_silent_workers_chunk_goes_to_another_and_its_late_calls_fail(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    dead, alive = worker(client, "dead", 0.15), worker(client, "alive", 0.15)
    lost = taken(dead)
    started = time.monotonic()
    assert dead.spool(lost, {(0, 0): b"spooled"}, num_rows=1)
    assert alive.take() is None
    lease = wait_for("a takeover", alive.take)
    assert 0.14 < time.monotonic() - started < 0.15 + 2
    assert lease.spooled == {(0, 0): b"spooled"}
    assert lease.attempt > lost.attempt
    assert lease.token != lost.token
    assert dead.renew([lost]) == [Renewal.LOST]
    assert not dead.spool(lost, {(1, 0): b"late"}, num_rows=2)
    assert not dead.probe(lost, range(1))
    assert complete(dead, lost) is Commit.STALE
    dead.handback([lost])
    assert alive.renew([lease]) == [Renewal.OK]
    end(client, lease)
    assert complete(dead, lost) is Commit.STALE


def test_a_renewed_lease_is_kept_however_long(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    owner, other = worker(client, "owner", 0.2), worker(client, "other", 0.2)
    lease = taken(owner)
    deadline = time.monotonic() + 0.8
    while time.monotonic() < deadline:
        assert owner.renew([lease]) == [Renewal.OK]
        assert other.take() is None
        other.wait_for_work(0.02)
    end(client, lease)


def test_an_expired_lease_that_nobody_took_can_be_renewed(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    owner = worker(client)
    lease = taken(owner)
    expire(client, owner, lease)
    assert owner.renew([lease]) == [Renewal.OK]
    assert worker(client, "other").take() is None
    assert owner.take() is None
    end(client, lease)


def test_a_completion_after_the_lease_ran_out_counts_if_nobody_took_over(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    owner = worker(client)
    lease = taken(owner)
    expire(client, owner, lease)
    end(client, lease)


def test_after_an_outage_living_workers_keep_their_chunks(client: redis.Redis, queue: JobQueue) -> None:
    """The first to reconnect finds all leases expired, and must wait for the others to renew."""
    submit(queue, make_spec(num_rows=16, chunk_rows=4))
    owner, first = worker(client, "owner", 1.0), worker(client, "first", 1.0)
    leases = [taken(owner) for _ in range(4)]
    for lease in leases:
        expire(client, owner, lease)
    client.set(owner.keys.part("tick"), 1)  # nobody was seen for longer than a lease
    assert first.take() is None
    assert first.take() is None
    assert owner.renew(leases) == [Renewal.OK] * 4
    assert first.take() is None
    end(client, *leases)


def test_also_a_renewal_starts_the_time_of_grace(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=8, chunk_rows=4))
    owner, first = worker(client, "owner", 1.0), worker(client, "first", 1.0)
    mine, yours = taken(first), taken(owner)
    for lease in (mine, yours):
        expire(client, owner, lease)
    client.set(owner.keys.part("tick"), 1)
    assert first.renew([mine]) == [Renewal.OK]
    assert first.take() is None
    assert owner.renew([yours]) == [Renewal.OK]
    end(client, mine, yours)


def test_the_grace_ends_and_does_not_begin_again(client: redis.Redis, queue: JobQueue) -> None:
    """Also when workers look more seldom than renewals are due, so that each look finds a gap."""
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    dead, alive = worker(client, "dead", 0.1), worker(client, "alive", 0.1)
    lost = taken(dead)
    expire(client, dead, lost)
    client.delete(dead.keys.part("tick"))
    assert alive.take() is None
    looks = []

    def look() -> Lease | None:
        client.set(dead.keys.part("tick"), 1)
        looks.append(1)
        return alive.take()

    end(client, wait_for("the end of the grace", look, 1.0))
    assert len(looks) > 1


def test_a_repeated_take_gets_the_same_chunk(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=8, chunk_rows=4))
    group, token = worker(client), secrets.token_hex(8)
    first = group.take(token)
    assert first is not None
    assert group.take(token) == first
    assert queue.status(first.spec.job_id).leases[0].chunk == first.chunk
    second = group.take()
    assert second is not None
    assert second.chunk != first.chunk
    end(client, first, second)


def test_the_owner_is_told_that_it_repeats_itself(client: redis.Redis, queue: JobQueue) -> None:
    spec = submit(queue, make_spec(num_rows=8, chunk_rows=4))
    group = worker(client)
    lease, other = taken(group), taken(group)
    assert complete(group, lease) is Commit.COMMITTED
    assert complete(group, lease) is Commit.AGAIN
    assert queue.status(spec.job_id).rows_ok == 4
    group.renamed([lease, lease])
    end(client, other)


def test_miscounted_rows_are_refused(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=6, chunk_rows=4))
    group = worker(client)
    first, last = taken(group), taken(group)
    for rows_ok, rows_error in ((3, 0), (4, 1), (0, 0)):
        with pytest.raises(ValueError, match="chunk of 4"):
            group.complete(first, rows_ok=rows_ok, rows_error=rows_error)
    with pytest.raises(ValueError, match="chunk of 2"):
        group.complete(last, rows_ok=4, rows_error=0)
    end(client, first, last)


def test_a_result_is_spooled_once_and_found_by_readers(
    client: redis.Redis, queue: JobQueue, rng: random.Random
) -> None:
    spec = submit(queue, make_spec(num_rows=256, chunk_rows=256))
    group = worker(client)
    lease = taken(group)
    expected: dict[tuple[int, int], bytes] = {}
    for _ in range(12):
        samples = {(rng.randrange(256), rng.randrange(3)) for _ in range(rng.randrange(1, 60))}
        results = {sample: rng.randbytes(rng.randrange(300)) for sample in samples}
        expected = {**results, **expected}
        num_rows = rng.randrange(256)
        assert group.spool(lease, results, num_rows=num_rows)
    assert queue.spooled(spec.job_id, 0) == dict(sorted(expected.items()))
    assert queue.status(spec.job_id).num_spooled == len(expected)
    assert queue.status(spec.job_id).rows_spooled == num_rows
    expire(client, group, lease)
    lease = taken(group)
    assert lease.spooled == expected
    end(client, lease)
    assert queue.spooled(spec.job_id, 0) == {}


def test_many_and_large_results_in_one_call(client: redis.Redis, queue: JobQueue) -> None:
    spec = submit(queue, make_spec(num_rows=256, chunk_rows=256))
    group = worker(client)
    lease = taken(group)
    results = {(row, sample): b"%d.%d " % (row, sample) * 1000 for row in range(256) for sample in range(10)}
    assert group.spool(lease, results, num_rows=256)
    assert queue.spooled(spec.job_id, 0) == results
    end(client, lease)


def test_a_new_job_wakes_all_idle_workers(redis_server: EmbeddedRedis, client: redis.Redis, queue: JobQueue) -> None:
    groups = [worker(connect(redis_server.url), f"w{number}", lease_s=60) for number in range(2)]
    for group in groups:
        assert group.take() is None
    waits = [threading.Thread(target=group.wait_for_work, args=(30,)) for group in groups]
    started = time.monotonic()
    for wait in waits:
        wait.start()
    wait_for("two sleepers", lambda: client.info("clients")["blocked_clients"] == 2)
    spec = submit(queue, make_spec())
    for wait in waits:
        wait.join(10)
    assert time.monotonic() - started < 4  # they would have slept for five seconds at least
    queue.cancel(spec.job_id)


def test_work_that_came_before_the_wait_is_not_slept_through(client: redis.Redis, queue: JobQueue) -> None:
    group = worker(client, lease_s=60)
    assert group.take() is None
    spec = submit(queue, make_spec())
    started = time.monotonic()
    group.wait_for_work(30)
    assert time.monotonic() - started < 2
    queue.cancel(spec.job_id)


def test_an_idle_worker_wakes_when_a_lease_runs_out(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    taken(worker(client, "dead", lease_s=0.2))
    idle = worker(client, "idle", lease_s=0.2)

    def take_or_wait() -> Lease | None:
        lease = idle.take()
        if lease is None:
            idle.wait_for_work(30)
        return lease

    end(client, wait_for("a takeover", take_or_wait, 3))
