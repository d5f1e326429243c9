"""The sending end of token streams: silent without readers, and no trouble to its group."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from minisgl_jobs import streams
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.streams import RowDelta, TokenPublisher
from tests.jobs.helpers import MODEL, submit
from tests.jobs.stream_world import World


@pytest.fixture
def world(client: redis.Redis, rng: random.Random) -> World:
    return World(client, rng)


def test_nothing_is_published_when_nobody_reads(world: World) -> None:
    submit(world.jobs, world.spec)
    world.group().run()
    keys = ChunkQueue(world.client, MODEL, "x").keys
    assert not world.client.exists(keys.job(world.spec.job_id, "tokens"))
    world.end()


def test_a_publisher_outlives_a_redis_that_is_away_and_then_sends_snapshots(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(world.jobs, world.spec)
    now = [0.0]
    publisher = TokenPublisher(world.client, MODEL, clock=lambda: now[0])
    world.reader().announce()
    job = world.spec.job_id
    assert publisher.poll([job]) == {job}
    publisher.add(job, RowDelta(0, 0, 1, 0, "a"))
    publisher.flush()
    assert publisher.poll([job]) == set()
    with monkeypatch.context() as patch:
        patch.setattr(world.client, "evalsha", _refuse)
        publisher.add(job, RowDelta(0, 0, 1, 1, "b"))
        publisher.flush()
    assert not publisher.is_watched(job)
    assert publisher.poll([job]) == set()
    now[0] += 2
    assert publisher.poll([job]) == {job}
    publisher.add(job, RowDelta(0, 0, 1, 0, "abc"))
    publisher.flush()
    keys = ChunkQueue(world.client, MODEL, "x").keys
    entries: Any = world.client.xrange(keys.job(job, "tokens"))
    messages = [streams.message_decoder.decode(fields[b"message"]) for _, fields in entries]
    assert [(message.rows[0].text, message.is_snapshot) for message in messages] == [("a", True), ("abc", True)]
    world.jobs.cancel(job)
    world.end()


def _refuse(*_: Any, **__: Any) -> Any:
    raise redis.exceptions.ConnectionError("refused")


def test_large_snapshots_are_cut_into_messages(world: World) -> None:
    submit(world.jobs, world.spec)
    publisher = TokenPublisher(world.client, MODEL)
    world.reader().announce()
    job = world.spec.job_id
    publisher.poll([job])
    for row in range(5):
        publisher.add(job, RowDelta(row, 0, 1, 0, "x" * 100_000))
    publisher.flush()
    keys = ChunkQueue(world.client, MODEL, "x").keys
    entries: Any = world.client.xrange(keys.job(job, "tokens"))
    messages = [streams.message_decoder.decode(fields[b"message"]) for _, fields in entries]
    assert [len(message.rows) for message in messages] == [2, 2, 1]
    assert [message.is_snapshot for message in messages] == [False, False, True]
    world.jobs.cancel(job)
    world.end()
