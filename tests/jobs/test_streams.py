"""Token streams: whoever reads, whenever and however slowly, gets every token of every row once."""

from __future__ import annotations

import random
import threading
import time

import pytest
import redis

from minisgl_batch.errors import JobNotFoundError
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.model import JobState
from minisgl_jobs.reader import JobChanged
from minisgl_jobs.streams import TokenPublisher
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, submit, wait_for
from tests.jobs.stream_world import Seen, World, cut, own_client, read_all, saboteur, tick_until


@pytest.fixture
def world(client: redis.Redis, rng: random.Random) -> World:
    return World(client, rng)


def test_a_reader_from_the_start_gets_everything_from_the_stream(world: World, redis_server: EmbeddedRedis) -> None:
    submit(world.jobs, world.spec)
    reader = world.reader(own_client(redis_server))
    reader.announce()
    thread = world.serve_in_thread(lambda: time.sleep(0.001))
    seen = read_all(reader)
    thread.join()
    seen.check(world.results)
    assert seen.num_restarts == 0
    assert JobState.RUNNING in seen.states


@pytest.mark.parametrize("start", [0.0, 0.3, 0.7, 0.95])
def test_a_late_joiner_gets_everything(world: World, redis_server: EmbeddedRedis, start: float) -> None:
    submit(world.jobs, world.spec)
    total = sum(map(len, world.tokens.values()))
    made = threading.Event()

    def pause() -> None:
        time.sleep(0.001)
        if sum(result.completion_tokens for result in world.results.values()) >= start * total:
            made.set()

    thread = world.serve_in_thread(pause)
    assert made.wait(20)
    seen = read_all(world.reader(own_client(redis_server)))
    thread.join()
    seen.check(world.results)


def test_two_readers_at_different_times_both_get_everything(world: World, redis_server: EmbeddedRedis) -> None:
    submit(world.jobs, world.spec)
    seen: list[Seen] = []
    first = threading.Thread(target=lambda: seen.append(read_all(world.reader(own_client(redis_server)))))
    first.start()
    thread = world.serve_in_thread(lambda: time.sleep(0.002))
    wait_for("half of the rows", lambda: len(world.results) > 20)
    seen.append(read_all(world.reader(own_client(redis_server))))
    first.join()
    thread.join()
    assert len(seen) == 2
    for one in seen:
        one.check(world.results)


def test_a_slow_reader_of_a_trimmed_stream_gets_everything(world: World, redis_server: EmbeddedRedis) -> None:
    """Like one that the server has dropped for being slow, and for which the stream was too short."""
    submit(world.jobs, world.spec)
    stream = ChunkQueue(world.client, MODEL, "x").keys.job(world.spec.job_id, "tokens")
    reader = world.reader(own_client(redis_server))
    reader.announce()
    with saboteur(redis_server, lambda client: cut(client) + client.xtrim(stream, maxlen=0)):
        thread = world.serve_in_thread(lambda: time.sleep(0.003))
        seen = read_all(reader, lambda: time.sleep(0.001))
    thread.join()
    seen.check(world.results)
    assert world.num_fetches > 1


def test_a_trimmed_stream_in_the_middle_of_a_row_is_bridged_by_a_snapshot(
    world: World, redis_server: EmbeddedRedis
) -> None:
    """Messages vanish from stream and channel; the rows that run are whole again before any of them has ended."""
    world.tokens = {row: ["x"] * 5000 for row in world.tokens}
    submit(world.jobs, world.spec)
    group = world.group()
    lease = group.take()
    assert lease is not None
    keys = group.queue.keys
    events = iter(world.reader(own_client(redis_server)))
    seen = Seen()
    seen.add(next(events))
    tick_until(group, events, seen, lambda: len(seen.texts) == 10)
    # What these ticks send is nowhere to be found afterwards.
    quiet = TokenPublisher(world.client, "another-model")
    sending, group.publisher = group.publisher, quiet
    for _ in range(20):
        group.tick()
    world.client.delete(keys.job(world.spec.job_id, "tokens"))
    group.publisher = sending
    lengths = {len(text) for text in seen.texts.values()}
    tick_until(group, events, seen, lambda: min(map(len, seen.texts.values())) > max(lengths) + 20)
    assert not seen.finished
    assert seen.num_restarts == 0
    events.close()  # type: ignore[attr-defined]
    world.jobs.cancel(world.spec.job_id)


def test_a_reader_whose_connection_is_cut_again_and_again_gets_everything(
    world: World, redis_server: EmbeddedRedis
) -> None:
    submit(world.jobs, world.spec)
    with saboteur(redis_server, cut) as num_cuts:
        # The rows run on until there were some cuts.
        thread = world.serve_in_thread(lambda: time.sleep(0.002 if len(num_cuts) >= 5 else 0.02))
        seen = read_all(world.reader(own_client(redis_server)))
    thread.join()
    seen.check(world.results)
    assert len(num_cuts) >= 3


def test_readers_that_leave_and_come_back_together_see_all(world: World, redis_server: EmbeddedRedis) -> None:
    """Each time a new reader goes on; what they saw last of each row is its text."""
    submit(world.jobs, world.spec)
    thread = world.serve_in_thread(lambda: time.sleep(0.002))
    for num_events in (5, 20, 60):
        part = Seen()
        for event in world.reader(own_client(redis_server)):
            part.add(event)
            num_events -= 1
            if num_events == 0:
                break
    seen = read_all(world.reader(own_client(redis_server)))
    thread.join()
    seen.check(world.results)


def test_a_chunk_that_is_run_again_starts_its_rows_anew(world: World, redis_server: EmbeddedRedis) -> None:
    submit(world.jobs, world.spec)
    reader = world.reader(own_client(redis_server))
    reader.announce()
    dead = world.group()
    lease = dead.take()
    assert lease is not None
    for _ in range(3):
        dead.tick()
    world.tokens.update({row: ["other ", *world.tokens[row]] for row in dead.made})
    world.client.zadd(dead.queue.keys.part("lease"), {f"{world.spec.job_id}|{lease.chunk}": 1})
    thread = world.serve_in_thread(lambda: time.sleep(0.001))
    seen = read_all(reader)
    thread.join()
    dead.lease = lease
    seen.check(world.results)
    assert seen.num_restarts > 0


def test_only_the_wanted_rows_are_read(world: World, redis_server: EmbeddedRedis) -> None:
    submit(world.jobs, world.spec)
    thread = world.serve_in_thread(lambda: time.sleep(0.001))
    seen = read_all(world.reader(own_client(redis_server), rows={3, 17, 999}))
    thread.join()
    assert set(seen.texts) == {(3, 0), (17, 0)}
    assert seen.texts[3, 0] == world.results[3].text


def test_a_finished_job_is_read_from_its_results(world: World) -> None:
    submit(world.jobs, world.spec)
    world.group().run()
    world.end()
    seen = read_all(world.reader())
    seen.check(world.results)
    assert seen.states == [JobState.FINISHED]


def test_a_reader_of_an_unknown_job_is_told(world: World) -> None:
    with pytest.raises(JobNotFoundError):
        world.reader()


def test_a_reader_sees_a_cancellation_at_once(world: World, redis_server: EmbeddedRedis) -> None:
    world.tokens = {row: ["x"] * 100_000 for row in world.tokens}
    submit(world.jobs, world.spec)
    group = world.group()
    lease = group.take()
    assert lease is not None
    times: dict[JobState, float] = {}

    def read() -> None:
        for event in world.reader(own_client(redis_server)):
            if isinstance(event, JobChanged):
                times[event.state] = time.monotonic()

    thread = threading.Thread(target=read)
    thread.start()
    wait_for("the reader", lambda: times)
    canceled = time.monotonic()
    world.jobs.cancel(world.spec.job_id)
    wait_for("the news", lambda: JobState.CANCELING in times)
    assert times[JobState.CANCELING] - canceled < 0.5
    group.queue.handback([lease])
    world.end()
    thread.join(10)
    assert list(times)[-1] is JobState.CANCELED
