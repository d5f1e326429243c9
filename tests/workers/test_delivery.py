"""What a worker group does for its chunks: kept, spooled, committed once, whatever Redis, the disk or others do."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from minisgl_batch.client import Client
from minisgl_jobs.connection import connect
from minisgl_jobs.dataset import read_dataset
from minisgl_jobs.model import JobState
from tests.jobs.helpers import expire, wait_for
from tests.jobs.own_server import OwnServer
from tests.workers.delivering import MODEL, Group, group, part_bytes


@pytest.fixture
def first(client: redis.Redis) -> Iterator[Group]:
    with group(client, MODEL) as made:
        yield made


@pytest.fixture
def second(client: redis.Redis) -> Iterator[Group]:
    made = Group(client, MODEL, name="group-2")
    yield made
    made.delivery.hand_back()


# ------------------------------------------------------------------- rows


def test_rows_out_are_rows_in_for_any_chunk_size_also_when_prompts_repeat(
    api: Client, first: Group, tmp_path: Path, rng: random.Random
) -> None:
    for number in range(4):
        prompts = [rng.choice("abc") for _ in range(rng.randrange(1, 40))]
        folder = tmp_path / str(number)
        api.submit(prompts, model=MODEL, output=folder, chunk_rows=rng.randrange(1, 45))
        first.run_all()
        table = read_dataset(folder)
        assert table["row_index"].to_pylist() == list(range(len(prompts)))
        assert [text[0] for text in table["text"].to_pylist()] == prompts


def test_a_chunk_that_is_taken_over_starts_from_its_spooled_rows(
    client: redis.Redis, api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    api.submit(list("abcdef"), model=MODEL, output=tmp_path)
    work = first.take()
    first.run_some(work, 4)
    expire(client, first.queue, work.lease)
    second.run_all()
    assert second.ran == [(4, 0), (5, 0)]
    assert read_dataset(tmp_path)["text"].to_pylist() == [f"{prompt} 0 in epoch 0" for prompt in "abcdef"]
    first.keeper.renew()
    first.tick()
    assert first.delivery.stopped == [work]


def test_a_drained_group_hands_back_its_chunk_with_the_finished_rows(
    api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    job = api.submit(list("abcdef"), model=MODEL, output=tmp_path, chunk_rows=3)
    complete = first.take()
    first.run(complete)
    first.delivery.hand_back()  # a complete chunk is committed
    assert job.status().rows_ok == 3
    second.run_some(second.take(), 1)
    second.delivery.hand_back()
    third = Group(first.client, MODEL, name="group-3")
    third.run_all()
    assert third.ran == [(4, 0), (5, 0)]
    assert job.status().num_deaths == 0
    third.delivery.hand_back()


def test_a_committed_chunk_that_redis_has_lost_is_not_generated_again(
    client: redis.Redis, api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    job = api.submit(list("abcd"), model=MODEL, output=tmp_path, chunk_rows=2)
    work = first.take()
    first.run(work)
    before = [(key, max(0, client.pttl(key)), client.dump(key)) for key in client.scan_iter()]
    first.commit(work)
    client.flushall()
    for saved in before:
        client.restore(*saved)
    expire(client, first.queue, work.lease)
    second.run_all()
    assert second.ran == [(2, 0), (3, 0)]
    assert (job.status().state, job.status().rows_ok) == (JobState.FINISHED, 4)
    assert read_dataset(tmp_path)["row_index"].to_pylist() == [0, 1, 2, 3]


# ----------------------------------------------------------------- leases


def test_a_paused_worker_cannot_count_its_chunk_again(
    client: redis.Redis, api: Client, first: Group, second: Group, tmp_path: Path
) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path)
    work = first.take()
    first.run(work)
    expire(client, first.queue, work.lease)  # the first group is stopped here,
    second.run_all()
    parts = part_bytes(tmp_path)
    first.tick()  # and goes on
    wait_for("the second commit", lambda: first.tick() or not first.delivery.works)
    assert first.delivery.stopped == [work]
    assert (job.status().rows_ok, job.status().rows_error) == (2, 0)
    assert part_bytes(tmp_path) == parts
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".part")]


def test_leases_are_renewed_while_the_group_is_busy(client: redis.Redis, api: Client, tmp_path: Path) -> None:
    busy = Group(client, MODEL, lease_s=0.6)
    other = Group(client, MODEL, name="group-2", lease_s=0.6)
    api.submit(["a", "b"], model=MODEL, output=tmp_path, chunk_rows=2)
    work = busy.take()
    busy.keeper.start()
    until = time.monotonic() + 2
    while time.monotonic() < until:  # the group's main thread does nothing for its lease
        assert other.queue.take() is None
    assert busy.delivery.holds(work)
    busy.run_all()
    for worker in (busy, other):
        worker.delivery.hand_back()


def test_a_worker_that_was_stopped_past_its_lease_starts_no_row(
    client: redis.Redis, api: Client, tmp_path: Path
) -> None:
    stopped = Group(client, MODEL, lease_s=0.3)
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path)
    work = stopped.take()
    assert stopped.delivery.holds(work)
    wait_for("the end of the lease", lambda: not stopped.delivery.holds(work))
    stopped.keeper.renew()  # nobody has taken it meanwhile
    assert stopped.delivery.holds(work)
    job.cancel()
    stopped.keeper.renew()
    stopped.give_up(work)
    assert not stopped.delivery.holds(work)
    stopped.end_jobs()
    stopped.delivery.hand_back()


def test_a_worker_that_goes_on_after_a_pause_learns_at_once_whose_its_chunk_is(
    client: redis.Redis, api: Client, second: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_workers.lease_keeper.RENEW_S", 60.0)
    stopped = Group(client, MODEL, lease_s=180)
    api.submit(["a", "b"], model=MODEL, output=tmp_path)
    work = stopped.take()
    stopped.keeper.add(work.lease, time.monotonic() - 181)  # so long ago
    expire(client, stopped.queue, work.lease)
    second.run_all()
    stopped.keeper.start()
    wait_for("the loss", lambda: stopped.tick() or stopped.delivery.stopped == [work])
    stopped.delivery.hand_back()


# ------------------------------------------------------------- Redis away


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with OwnServer(tmp_path_factory.mktemp("redis")) as own:
        yield own


def test_finished_rows_wait_while_redis_is_away_and_are_spooled_again_when_it_may_have_lost_some(
    server: OwnServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = connect(server.url)
    worker = Group(client, MODEL)
    job = Client(server.url).submit(list("abcdef"), model=MODEL, output=tmp_path, chunk_rows=4)
    work = worker.take()
    left = worker.run_some(work, 2)
    worker.keeper.renew()
    assert job.status().num_spooled == 2
    num_works = len(worker.delivery.works)
    server.kill()
    worker.generate(work, left[0], 0)
    wait_for("a look at Redis", lambda: worker.tick() or "no chunk is taken" in caplog.text)
    assert len(work.unspooled) == 1
    assert len(worker.delivery.works) == num_works
    server.start()
    client.delete(worker.queue.keys.spool(job.id, work.lease.chunk))  # as after a power loss
    wait_for("Redis", lambda: worker.tick() or "Redis is back" in caplog.text)
    worker.keeper.renew()
    wait_for("all rows in the spool", lambda: worker.tick() or job.status().num_spooled == 3)
    worker.delivery.hand_back()
