"""Scripts of which only the first half took place, which Redis makes of them after two crashes: the queue recovers.

Each script's writes are recorded; then each beginning of them is applied to the state before, an audit runs, workers go
on, and the job must end with every row counted once and nothing left behind.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis

from minisgl_jobs.connection import connect
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.leases import ChunkQueue, Lease
from minisgl_jobs.model import JobState
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, complete, make_spec, payload, submit, taken
from tests.redis_leaks import leaked_keys

_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
NUM_ROWS, CHUNK_ROWS = 14, 4
FAR = 4e9  # Unix seconds


class Scene:
    """A job in the middle: chunk 0 done with an error row, 1 given back, 2 held, 3 not handed out."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.queue = JobQueue(client)
        self.group = ChunkQueue(client, MODEL, "w1")
        self.held_jobs = HeldJobs(client, self.group.keys.queue)
        self.outbox = Outbox(client, self.group.keys.queue)
        self.spec = make_spec(NUM_ROWS, CHUNK_ROWS)
        self.held: list[Lease] = []

    def open(self) -> None:
        submit(self.queue, self.spec)
        first, second, third = (taken(self.group) for _ in range(3))
        complete(self.group, first, rows_error=1)
        self.group.handback([second])
        self.held = [third]

    def let_time_come(self) -> None:
        """What a held job waits for is here."""
        job_key, held = self.group.keys.job(self.spec.job_id), self.group.keys.part("held")
        if self.client.hexists(job_key, "held"):
            self.client.hset(job_key, "start_ms", 1)
        self.client.zadd(held, {self.spec.job_id: 1}, xx=True)

    def commit_rest(self, rows_error: int = 0) -> None:
        while (lease := self.group.take()) is not None:
            complete(self.group, lease, rows_error)
        for lease in self.held:
            complete(self.group, lease)

    def finish(self) -> None:
        claim = self.outbox.claim(60)
        assert claim is not None
        assert self.outbox.finish(claim.job_id, claim.epoch, JobState.PARTIAL)

    def expire_leases(self) -> None:
        leases: Any = self.client.zrange(self.group.keys.part("lease"), 0, -1)
        for member in leases:
            self.client.zadd(self.group.keys.part("lease"), {member: 1})


def sealing(scene: Scene) -> Callable[[], Any]:
    scene.queue.create(scene.spec)
    scene.queue.append(scene.spec, {chunk: payload(scene.spec, chunk) for chunk in range(4)})
    return lambda: scene.queue.seal(scene.spec)


def sealing_a_held_job(scene: Scene) -> Callable[[], Any]:
    sealing(scene)
    return lambda: scene.queue.seal(scene.spec, start_at=FAR)


def releasing_a_held_job(scene: Scene) -> Callable[[], Any]:
    sealing_a_held_job(scene)()
    scene.let_time_come()
    return lambda: scene.held_jobs.start(scene.spec.job_id)


def canceling_a_held_job(scene: Scene) -> Callable[[], Any]:
    sealing_a_held_job(scene)()
    return lambda: scene.queue.cancel(scene.spec.job_id)


def taking_what_was_given_back(scene: Scene) -> Callable[[], Any]:
    scene.open()
    return scene.group.take


def taking_the_first(scene: Scene) -> Callable[[], Any]:
    submit(scene.queue, scene.spec)
    return scene.group.take


def taking_the_last(scene: Scene) -> Callable[[], Any]:
    scene.open()
    scene.held.append(taken(scene.group))
    return scene.group.take


def taking_over(scene: Scene) -> Callable[[], Any]:
    scene.open()
    scene.group.spool(scene.held[0], {(8, 0): b"x"}, num_rows=1)
    scene.group.probe(scene.held[0], range(9, 10))
    scene.expire_leases()
    return scene.group.take


def completing(scene: Scene) -> Callable[[], Any]:
    scene.open()
    scene.group.spool(scene.held[0], {(8, 0): b"x"}, num_rows=1)
    return lambda: complete(scene.group, scene.held[0])


def completing_with_errors(scene: Scene) -> Callable[[], Any]:
    scene.open()
    return lambda: complete(scene.group, scene.held[0], rows_error=2)


def completing_the_last(scene: Scene) -> Callable[[], Any]:
    scene.open()
    lease = scene.held.pop()
    scene.commit_rest()
    return lambda: complete(scene.group, lease)


def completing_a_retried_chunk(scene: Scene) -> Callable[[], Any]:
    retrying(scene)()
    lease = taken(scene.group)
    return lambda: complete(scene.group, lease)


def handing_back(scene: Scene) -> Callable[[], Any]:
    scene.open()
    return lambda: scene.group.handback(scene.held)


def canceling(scene: Scene) -> Callable[[], Any]:
    scene.open()
    return lambda: scene.queue.cancel(scene.spec.job_id)


def canceling_when_nobody_works(scene: Scene) -> Callable[[], Any]:
    submit(scene.queue, scene.spec)
    return lambda: scene.queue.cancel(scene.spec.job_id)


def dropping_a_canceled_chunk(scene: Scene) -> Callable[[], Any]:
    scene.open()
    scene.group.spool(scene.held[0], {(8, 0): b"x"}, num_rows=1)
    scene.queue.cancel(scene.spec.job_id)
    return lambda: scene.group.handback(scene.held)


def claiming(scene: Scene) -> Callable[[], Any]:
    scene.open()
    scene.commit_rest()
    return lambda: scene.outbox.claim(60)


def finishing(scene: Scene) -> Callable[[], Any]:
    scene.open()
    scene.commit_rest()
    return scene.finish


def retrying(scene: Scene) -> Callable[[], Any]:
    scene.open()
    scene.commit_rest(rows_error=1)
    scene.finish()
    return lambda: scene.queue.retry(scene.spec.job_id)


ACTS = [
    *(sealing_a_held_job, releasing_a_held_job, canceling_a_held_job),
    *(sealing, taking_the_first, taking_what_was_given_back, taking_the_last, taking_over, completing),
    *(completing_with_errors, completing_the_last, completing_a_retried_chunk, handing_back, canceling),
    *(canceling_when_nobody_works, dropping_a_canceled_chunk, claiming, finishing, retrying),
]


@pytest.mark.parametrize("act", ACTS)
def test_the_queue_recovers_from_every_half_of(
    act: Callable[[Scene], Callable[[], Any]], redis_server: EmbeddedRedis, client: redis.Redis
) -> None:
    scene = Scene(client)
    step = act(scene)
    before = snapshot(client)
    writes = record_writes(redis_server, client, step)
    assert len(writes) >= 2
    for num_writes in range(len(writes) + 1):
        restore(client, before)
        for write in writes[:num_writes]:
            client.execute_command(*write)
        go_on(scene)
        check(scene, f"after {num_writes} of {len(writes)} writes: {writes[:num_writes]}")


def go_on(scene: Scene) -> None:
    """What clients and workers do after a crash."""
    group = ChunkQueue(scene.client, MODEL, "w2")
    if scene.queue.status(scene.spec.job_id).state is JobState.SUBMITTING:
        submit(scene.queue, scene.spec)
    group.audit()
    scene.let_time_come()
    while (held := scene.held_jobs.claim()) is not None:
        scene.held_jobs.start(held)
    for _ in range(2):  # the second time for a claim or lease that somebody had
        scene.expire_leases()
        scene.client.zadd(group.keys.part("fin"), dict.fromkeys([scene.spec.job_id], 0), xx=True)
        while (lease := group.take()) is not None:
            assert lease.payload == payload(lease.spec, lease.chunk)
            complete(group, lease)
        while (claim := scene.outbox.claim(60)) is not None:
            job = scene.outbox.load(claim.job_id, claim.epoch)
            assert job is not None
            done = JobState.PARTIAL if job.rows_error else JobState.FINISHED
            scene.outbox.finish(claim.job_id, claim.epoch, JobState.CANCELED if job.is_canceled else done)
    group.audit()


def check(scene: Scene, when: str) -> None:
    status = scene.queue.status(scene.spec.job_id)
    assert status.state.is_final, when
    if status.state is not JobState.CANCELED:
        assert status.rows_done == NUM_ROWS, when
        assert status.chunks_done == 4, when
        assert scene.client.bitcount(scene.group.keys.job(scene.spec.job_id, "done")) == 4, when
    bad: Any = scene.client.hvals(scene.group.keys.job(scene.spec.job_id, "bad"))
    assert status.rows_error == sum(map(int, bad)), when
    assert status.leases == (), when
    assert not leaked_keys(scene.client), when


def snapshot(client: redis.Redis) -> dict[bytes, tuple[bytes, int]]:
    connection: Any = client
    return {name: (connection.dump(name), max(0, connection.pttl(name))) for name in connection.scan_iter(count=1000)}


def restore(client: redis.Redis, values: dict[bytes, tuple[bytes, int]]) -> None:
    client.flushdb()
    for name, (value, ttl_ms) in values.items():
        client.restore(name, ttl_ms, value)


def record_writes(server: EmbeddedRedis, client: redis.Redis, step: Callable[[], Any]) -> list[list[bytes]]:
    """The writing commands that scripts issue while `step` runs."""
    connection: Any = client
    infos = connection.execute_command("COMMAND")
    writing = {name for name, info in infos.items() if "write" in info["flags"]}
    watcher: Any = connect(server.url)
    writes = []
    with watcher.monitor() as monitor:
        step()
        client.echo("that is all")
        while b"that is all" not in (line := monitor.connection.read_response()):
            words = [codecs.escape_decode(word)[0] for word in _WORD.findall(line)]
            if b" lua] " in line and words[0].decode().lower() in writing:
                writes.append(words)
    watcher.close()
    return writes
