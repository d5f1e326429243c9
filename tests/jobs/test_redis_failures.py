"""Redis restarts, loses its last second, is full or away: what is under way goes on, and nothing counts twice."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from minisgl_batch.errors import RedisFullError, RedisUnavailableError
from minisgl_jobs.connection import connect
from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue, Commit, Lease, Renewal
from minisgl_jobs.model import JobSpec, JobState
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from tests.jobs.helpers import MODEL, complete, end_all, make_spec, payload, submit, taken, wait_for
from tests.jobs.own_server import OwnServer


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with OwnServer(tmp_path_factory.mktemp("redis")) as own:
        yield own


def test_a_restart_loses_neither_jobs_nor_scripts(server: OwnServer) -> None:
    client = connect(server.url)
    queue, group = JobQueue(client), ChunkQueue(client, MODEL, "w1")
    spec = submit(queue, make_spec(num_rows=12, chunk_rows=4))
    done, held = taken(group), taken(group)
    complete(group, done)
    group.spool(held, {(4, 0): b"kept"}, num_rows=1)
    wait_for("the append-only file", lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0)
    server.kill()
    server.start()
    assert group.renew([held]) == [Renewal.OK]
    assert queue.spooled(spec.job_id, 1) == {(4, 0): b"kept"}
    assert complete(group, held) is Commit.COMMITTED
    assert complete(group, held) is Commit.AGAIN
    complete(group, taken(group))
    end_all(Outbox(client, group.keys.queue))
    assert queue.status(spec.job_id).state is JobState.FINISHED


def test_a_redis_that_stays_away_is_said_clearly_and_in_time(server: OwnServer) -> None:
    client = connect(server.url)
    queue, group = JobQueue(client), ChunkQueue(client, MODEL, "w1")
    submit(queue, make_spec())
    lease = taken(group)
    server.kill()
    started = time.monotonic()
    for call in (group.take, lambda: group.renew([lease]), queue.jobs, lambda: group.wait_for_work(5)):
        with pytest.raises(RedisUnavailableError, match="away"):
            call()
    assert time.monotonic() - started < 30
    server.start()
    assert group.renew([lease]) == [Renewal.OK]


def test_a_full_redis_refuses_new_jobs_and_drains_the_old(client: redis.Redis) -> None:
    queue, group = JobQueue(client), ChunkQueue(client, MODEL, "w1")
    spec = submit(queue, make_spec(num_rows=16, chunk_rows=4))
    waiting = make_spec()
    queue.create(waiting)
    silent, kept = taken(group), taken(group)
    group.probe(kept, range(4, 5))
    outbox = Outbox(client, group.keys.queue)
    client.config_set("maxmemory", 1)
    try:
        for refused in (
            lambda: queue.create(make_spec()),
            lambda: queue.append(waiting, {0: b"x"}),
            lambda: group.spool(kept, {(4, 0): b"x"}, num_rows=1),
        ):
            with pytest.raises(RedisFullError):
                refused()
        assert group.renew([silent, kept]) == [Renewal.OK] * 2
        assert group.probe(kept, range(5, 6))
        group.handback([silent])
        assert complete(group, kept) is Commit.COMMITTED
        group.renamed([kept])
        while (lease := group.take()) is not None:
            assert complete(group, lease, rows_error=1) is Commit.COMMITTED
        assert queue.status(spec.job_id).state is JobState.FINALISING
        end_all(outbox)
        assert queue.status(spec.job_id).state is JobState.PARTIAL
        queue.cancel(waiting.job_id)
        end_all(outbox)
    finally:
        client.config_set("maxmemory", 0)
    assert queue.status(waiting.job_id).state is JobState.CANCELED


class Dataset:
    """Parts in memory, with the rules of the ones on disk: pending by token, final by rename."""

    def __init__(self) -> None:
        self.pending: dict[tuple[int, str], list[int]] = {}
        self.final: dict[int, list[int]] = {}

    def rename(self, chunk: int, token: str) -> None:
        rows = self.pending.pop((chunk, token), None)
        if rows is not None:
            self.final[chunk] = rows


class Attack:
    """One job, some workers that misbehave in all the ways there are, a server that loses its last writes."""

    def __init__(self, server: OwnServer, spec: JobSpec, seed: int) -> None:
        self.server = server
        self.spec = spec
        self.dataset = Dataset()
        self.over = threading.Event()
        self.errors: list[BaseException] = []
        self._seed = seed

    def run_worker(self, number: int) -> None:
        rng = random.Random(self._seed + number)
        while not self.over.is_set():
            self._run_once(f"w{number}-{rng.random()}", rng)

    def _run_once(self, name: str, rng: random.Random) -> None:
        try:
            group = ChunkQueue(connect(self.server.url), MODEL, name, lease_s=0.15, audit_s=0.5)
            self._work(group, rng)
        except RedisUnavailableError:
            self.over.wait(0.02)
        except BaseException as error:
            self.errors.append(error)
            raise

    def _work(self, group: ChunkQueue, rng: random.Random) -> None:
        while not self.over.is_set():
            lease = group.take()
            if lease is None:
                self._finalise(group)
                group.wait_for_work(0.05)
                continue
            assert lease.payload == payload(self.spec, lease.chunk)
            fate = rng.random()
            if fate < 0.1:
                return  # dies at once
            rows = set(lease.rows) - {row for row, _ in lease.spooled}
            results = {(row, 0): b"%d" % row for row in rng.sample(sorted(rows), len(rows) // 2)}
            group.spool(lease, results, num_rows=len(results))
            if fate < 0.2:
                return  # dies with rows spooled
            if fate < 0.3:
                group.handback([lease])
                continue
            if fate < 0.4:
                self.over.wait(0.3)  # is stopped past its lease, and knows nothing of it
            self._commit(group, lease, dies=fate < 0.5)

    def _commit(self, group: ChunkQueue, lease: Lease, *, dies: bool) -> None:
        self.dataset.pending[lease.chunk, lease.token] = list(lease.rows)
        answer = complete(group, lease)
        if answer is Commit.STALE:
            del self.dataset.pending[lease.chunk, lease.token]
        elif not dies:
            self.dataset.rename(lease.chunk, lease.token)
            group.renamed([lease])

    def _finalise(self, group: ChunkQueue) -> None:
        outbox = Outbox(connect(self.server.url), group.keys.queue)
        claim = outbox.claim(0.2)
        job = outbox.load(claim.job_id, claim.epoch) if claim else None
        if job is not None:
            for chunk, (token, _) in job.renames.items():
                self.dataset.rename(chunk, token)
            outbox.finish(job.spec.job_id, job.epoch, JobState.FINISHED)


def test_nothing_is_lost_or_doubled_whatever_dies(server: OwnServer, rng: random.Random) -> None:
    spec = make_spec(num_rows=1200, chunk_rows=8)
    attack = Attack(server, spec, rng.randrange(1 << 30))
    queue = JobQueue(connect(server.url))
    payloads = {chunk: payload(spec, chunk) for chunk in range(spec.num_chunks)}

    def submit_again() -> JobState:
        if queue.create(spec):  # as a client does that doesn't know what came through
            queue.append(spec, payloads)
            queue.seal(spec)
        return queue.status(spec.job_id).state

    submit_again()
    threads = [threading.Thread(target=attack.run_worker, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            attack.over.wait(rng.uniform(0.1, 0.5))
            server.lose_power(rng.randrange(4000))
            server.start()
            submit_again()
        wait_for("the end of the job", lambda: submit_again() is JobState.FINISHED or attack.errors, 30)
    finally:
        attack.over.set()
        for thread in threads:
            thread.join(10)
    assert not attack.errors
    assert sorted(row for rows in attack.dataset.final.values() for row in rows) == list(range(1200))
    status = queue.status(spec.job_id)
    assert (status.rows_ok, status.rows_error, status.chunks_done) == (1200, 0, spec.num_chunks)


def test_cancel_and_complete_race_to_one_end(client: redis.Redis, rng: random.Random) -> None:
    """Two connections at once: whoever comes first, the job ends, and a chunk counts once or not at all."""
    queue, other = JobQueue(client), JobQueue(connect(_url(client)))
    group = ChunkQueue(connect(_url(client)), MODEL, "w1")
    outbox = Outbox(client, queue_name(MODEL))
    for _ in range(60):
        spec = submit(queue, make_spec(num_rows=4, chunk_rows=2, job_id=f"race-{secrets.token_hex(4)}"))
        leases = [taken(group), taken(group)]
        complete(group, leases[0])
        barrier = threading.Barrier(2)
        refused: list[bool] = []

        def cancel(spec: JobSpec = spec, barrier: threading.Barrier = barrier, refused: list[bool] = refused) -> None:
            barrier.wait()
            try:
                other.cancel(spec.job_id)
            except Exception:  # noqa: BLE001 (recorded: a finished race is one of two fair outcomes)
                refused.append(True)

        thread = threading.Thread(target=cancel)
        thread.start()
        barrier.wait()
        time.sleep(rng.random() * 0.0005)
        assert complete(group, leases[1]) is Commit.COMMITTED
        thread.join()
        status = queue.status(spec.job_id)
        assert (status.state, status.rows_ok) == (JobState.FINALISING, 4)
        end_all(outbox)
        expected = JobState.FINISHED if refused else JobState.CANCELED
        assert queue.status(spec.job_id).state is expected


def _url(client: redis.Redis) -> str:
    return f"unix://{client.connection_pool.connection_kwargs['path']}"
