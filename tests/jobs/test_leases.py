"""Chunks as worker groups see them: expiry, takeover, grace, fairness, priority, poison, spools, the bell."""

from __future__ import annotations

import random
import secrets
import threading
import time

import pytest
import redis

from minisgl_jobs.connection import connect
from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue, Commit, Lease, Renewal
from minisgl_jobs.model import Priority
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, complete, end_all, make_spec, submit, taken, wait_for


@pytest.fixture
def queue(client: redis.Redis) -> JobQueue:
    return JobQueue(client)


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


# --- leases in real time ---------------------------------------------------------------------------------------------


def test_a_silent_workers_chunk_goes_to_another_and_its_late_calls_fail(client: redis.Redis, queue: JobQueue) -> None:
    submit(queue, make_spec(num_rows=4, chunk_rows=4))
    dead, alive = worker(client, "dead", 0.15), worker(client, "alive", 0.15)
    lost = taken(dead)
    started = time.monotonic()
    assert dead.spool(lost, {(0, 0): b"spooled"})
    assert alive.take() is None
    lease = wait_for("a takeover", alive.take)
    assert 0.14 < time.monotonic() - started < 0.15 + 2
    assert lease.spooled == {(0, 0): b"spooled"}
    assert lease.attempt > lost.attempt
    assert lease.token != lost.token
    assert dead.renew([lost]) == [Renewal.LOST]
    assert not dead.spool(lost, {(1, 0): b"late"})
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


# --- whose turn it is ------------------------------------------------------------------------------------------------


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
    group.spool(first, {(1, 0): b"kept"})
    group.handback([second, first])
    again = [taken(group) for _ in range(3)]
    assert [lease.chunk for lease in again] == [0, 1, 2]
    assert again[0].spooled == {(1, 0): b"kept"}
    assert [lease.num_deaths for lease in again] == [0, 0, 0]
    assert queue.status(spec.job_id).num_deaths == 0
    end(client, *again)


# --- poison ----------------------------------------------------------------------------------------------------------


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
            assert group.spool(lease, {(row, 0): b"done" for row in running})
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


# --- calls that come twice -------------------------------------------------------------------------------------------


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


# --- spools ----------------------------------------------------------------------------------------------------------


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
        assert group.spool(lease, results)
        expected = {**results, **expected}
    assert queue.spooled(spec.job_id, 0) == dict(sorted(expected.items()))
    assert queue.status(spec.job_id).num_spooled == len(expected)
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
    assert group.spool(lease, results)
    assert queue.spooled(spec.job_id, 0) == results
    end(client, lease)


# --- the bell --------------------------------------------------------------------------------------------------------


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
