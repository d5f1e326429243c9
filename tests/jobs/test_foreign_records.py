"""Records that others wrote into the same Redis: passed over with the key's name, and the rest is shown."""

from __future__ import annotations

import random
import time

import pytest
import redis

from minisgl_batch.errors import DamagedJobError
from minisgl_jobs.keys import QUEUES, QueueKeys, queue_name
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.streams import RowDelta, TokenPublisher
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, make_spec, submit
from tests.jobs.helpers import worker as make_worker
from tests.jobs.stream_world import World, own_client, read_all

KEYS = QueueKeys(queue_name(MODEL))
JOB = KEYS.job("planted")


def test_foreign_workers(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    queue = JobQueue(client)
    spec = submit(queue, make_spec())
    make_worker(client).take()
    for name in ("ghost", b"\xff"):
        key = KEYS.worker("").encode() + (name if isinstance(name, bytes) else name.encode())
        client.set(key, b"garbage", px=60_000)
        client.zadd(KEYS.part("workers"), {name: 9e15})
    for _ in range(2):
        assert queue.workers() == []
        assert [status.job_id for status in queue.jobs()] == [spec.job_id]
    assert sorted(caplog.messages) == [
        f"not listed: {KEYS.worker(name)} in Redis is no record of minisgl-batch: remove it"
        for name in ("\\xff", "ghost")
    ]
    client.delete(KEYS.part("workers"))
    client.set(KEYS.part("workers"), "text", px=60_000)
    assert queue.workers() == []
    assert caplog.messages[-1].startswith(f"not listed: {KEYS.part('workers')} in Redis is no record")
    queue.cancel(spec.job_id)
    client.delete(KEYS.worker("").encode() + b"\xff")  # the check of what a test leaves reads names as text


@pytest.mark.parametrize("content", ["text", {"a": "b"}, {"schema": "1", "spec": "garbage", "state": "queued"}])
def test_a_foreign_job(client: redis.Redis, caplog: pytest.LogCaptureFixture, content: str | dict[str, str]) -> None:
    queue = JobQueue(client)
    spec = submit(queue, make_spec())
    if isinstance(content, str):
        client.set(JOB, content)
    else:
        client.hset(JOB, mapping=content)
    client.zadd(KEYS.part("jobs"), {"planted": 9e15})
    assert [status.job_id for status in queue.jobs()] == [spec.job_id]
    assert caplog.messages == [f"not listed: {JOB} in Redis is no record of minisgl-batch: remove it"]
    with pytest.raises(DamagedJobError, match="job:planted in Redis is no record of minisgl-batch"):
        queue.status("planted")
    queue.cancel(spec.job_id)
    client.delete(JOB)


def test_a_foreign_list_of_jobs(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    client.hset(QUEUES, KEYS.queue, MODEL)
    client.set(KEYS.part("jobs"), "text", px=60_000)
    assert JobQueue(client).jobs() == []
    assert caplog.messages == [f"not listed: {KEYS.part('jobs')} in Redis is no record of minisgl-batch: remove it"]


def test_foreign_queues(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    queue = JobQueue(client)
    spec = submit(queue, make_spec())
    client.hset(QUEUES, b"\xff", "model")
    client.hset(QUEUES, "other", b"\xff")
    assert queue.queues() == {KEYS.queue: MODEL}
    assert queue.status(spec.job_id).job_id == spec.job_id
    assert sorted(caplog.messages) == [
        f"not listed: {QUEUES} (field {field}) in Redis is no record of minisgl-batch: remove it"
        for field in ("\\xff", "other")
    ]
    queue.cancel(spec.job_id)
    client.delete(QUEUES)
    client.set(QUEUES, "text")
    for call in (queue.jobs, queue.workers, lambda: submit(queue, make_spec())):
        with pytest.raises(DamagedJobError, match=r"^mb:queues in Redis is no record of minisgl-batch: remove it$"):
            call()


def test_foreign_entries_of_a_token_stream(
    client: redis.Redis, redis_server: EmbeddedRedis, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(client, rng)
    submit(world.jobs, world.spec)
    stream, events = (KEYS.job(world.spec.job_id, part) for part in ("tokens", "events"))
    reader = world.reader(own_client(redis_server))
    reader.announce()
    client.xadd(stream, {"x": "y"})

    def plant() -> None:
        client.xadd(stream, {"x": "y"})
        client.xadd(stream, {"previous": "0-0", "message": b"\xff"})
        client.publish(events, "x")
        client.publish(events, "tokens x")
        time.sleep(0.001)

    thread = world.serve_in_thread(plant)
    seen = read_all(reader)
    thread.join()
    seen.check(world.results)
    assert [message.endswith("they are passed over") for message in caplog.messages] == [True]


def test_a_foreign_key_in_place_of_a_token_stream(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    queue, publisher = JobQueue(client), TokenPublisher(client, MODEL)
    bad, good = (submit(queue, make_spec()).job_id for _ in range(2))
    client.set(KEYS.job(bad, "tokens"), "text", px=60_000)
    for job in (bad, good):
        client.set(KEYS.job(job, "watch"), "x", px=60_000)
    assert publisher.poll([bad, good]) == {bad, good}
    for _ in range(2):
        for job in (bad, good):
            publisher.add(job, RowDelta(0, 0, 1, 0, "a"))
        publisher.flush()
    assert client.xlen(KEYS.job(good, "tokens")) == 2
    assert [message.startswith(f"nobody can read the tokens of job {bad}: ") for message in caplog.messages] == [True]
    for job in (bad, good):
        queue.cancel(job)
