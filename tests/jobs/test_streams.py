"""Token streams: whoever reads, whenever and however slowly, gets every token of every row once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from minisgl_batch.errors import JobNotFoundError
from minisgl_jobs import streams
from minisgl_jobs.connection import connect
from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue, Lease
from minisgl_jobs.model import JobSpec, JobState, RowResult
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import Event, JobChanged, TokenReader
from minisgl_jobs.row_texts import RowFinished, RowStarted, RowText, RowTexts
from minisgl_jobs.streams import RowDelta, RowEnd, TokenPublisher
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, complete, end_all, make_spec, submit, wait_for


def text_of(row: int, rng: random.Random) -> list[str]:
    """The tokens of a row: Unicode, of several lengths."""
    return [rng.choice(["a", "bc", "ž", "한국", "👩‍💻", " "]) + str(row % 10) for _ in range(rng.randrange(1, 30))]


class Group:
    """A worker group as far as readers can tell: it takes chunks, makes a token per row and tick, spools, commits."""

    def __init__(self, client: redis.Redis, tokens: dict[int, list[str]], results: dict[int, RowResult]) -> None:
        self.queue = ChunkQueue(client, MODEL, f"w{id(self)}")
        self.publisher = TokenPublisher(client, MODEL)
        self.tokens = tokens
        self.results = results
        self.lease: Lease | None = None
        self.made: dict[int, int] = {}

    def take(self) -> Lease | None:
        self.lease = self.queue.take()
        if self.lease is not None:
            self.made = {row: 0 for row in self.lease.rows if (row, 0) not in self.lease.spooled}
        return self.lease

    def tick(self) -> None:
        lease = self.lease
        assert lease is not None
        job = lease.spec.job_id
        for job_id in self.publisher.poll([job]):
            assert job_id == job
            for row, made in self.made.items():
                self.publisher.add(job, RowDelta(row, 0, lease.attempt, 0, "".join(self.tokens[row][:made])))
        finished = []
        for row, made in self.made.items():
            text = "".join(self.tokens[row][:made])
            new = self.tokens[row][made]
            self.made[row] += 1
            end = None
            if made + 1 == len(self.tokens[row]):
                finished.append(row)
                self.results[row] = RowResult(row, text=text + new, prompt_tokens=3, completion_tokens=made + 1)
                self.queue.spool(lease, {(row, 0): b"result"})
                end = RowEnd("ok", "stop", len(text + new), 1, 3, made + 1)
            self.publisher.add(job, RowDelta(row, 0, lease.attempt, len(text), new, end))
        for row in finished:
            del self.made[row]
        self.publisher.flush()

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """Serve until there is nothing to take."""
        while self.take() is not None:
            assert self.lease is not None
            while self.made:
                self.tick()
                pause()
            complete(self.queue, self.lease)


@dataclass
class Seen:
    """What came out of a reader, checked as it comes."""

    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    finished: dict[tuple[int, int], RowFinished] = field(default_factory=dict)
    states: list[JobState] = field(default_factory=list)
    num_restarts: int = 0

    def add(self, event: Event) -> None:
        if isinstance(event, JobChanged):
            self.states.append(event.state)
            return
        sample = (event.row_index, event.sample_index)
        assert sample not in self.finished, f"{event} after the end of its row"
        if isinstance(event, RowStarted):
            self.num_restarts += sample in self.texts
            self.texts[sample] = ""
        elif isinstance(event, RowText):
            assert event.offset == len(self.texts[sample]), f"{event} after {self.texts[sample]!r}"
            assert event.text
            self.texts[sample] += event.text
        else:
            self.finished[sample] = event

    def check(self, results: dict[int, RowResult], state: JobState = JobState.FINISHED) -> None:
        assert self.states[-1] is state
        assert {row: text for (row, _), text in self.texts.items()} == {r: results[r].text for r in results}
        assert {row for row, _ in self.finished} == set(results)
        for (row, _), end in self.finished.items():
            assert (end.prompt_tokens, end.completion_tokens) == (3, results[row].completion_tokens)


class World:
    """A job with known tokens."""

    def __init__(self, client: redis.Redis, rng: random.Random, num_rows: int = 40, chunk_rows: int = 10) -> None:
        self.client = client
        self.jobs = JobQueue(client)
        self.spec: JobSpec = make_spec(num_rows, chunk_rows)
        self.tokens = {row: text_of(row, rng) for row in range(num_rows)}
        self.results: dict[int, RowResult] = {}
        self.num_fetches = 0

    def group(self) -> Group:
        return Group(self.client, self.tokens, self.results)

    def fetch(self, rows: Sequence[range]) -> Iterator[RowResult]:
        self.num_fetches += 1
        for part in rows:
            for row in part:
                if row in self.results:
                    yield self.results[row]

    def reader(self, client: redis.Redis | None = None, **options: Any) -> TokenReader:
        return TokenReader(client or self.client, self.spec.job_id, self.fetch, **options)

    def end(self) -> None:
        end_all(Outbox(self.client, queue_name(MODEL)))

    def serve_in_thread(self, pause: Callable[[], None]) -> threading.Thread:
        def serve() -> None:
            self.group().run(pause)
            self.end()

        thread = threading.Thread(target=serve)
        thread.start()
        return thread


@pytest.fixture
def world(client: redis.Redis, rng: random.Random) -> World:
    return World(client, rng)


def own_client(server: EmbeddedRedis) -> redis.Redis:
    return connect(server.url)


def cut(client: Any) -> int:
    """Drop the connections of all readers."""
    return int(client.execute_command("CLIENT", "KILL", "TYPE", "pubsub"))


@contextmanager
def saboteur(server: EmbeddedRedis, act: Callable[[Any], int]) -> Iterator[list[int]]:
    """Do this again and again meanwhile; the list holds what came of it, when anything did."""
    client, over, done = own_client(server), threading.Event(), list[int]()

    def run() -> None:
        while not over.wait(0.03):
            if number := act(client):
                done.append(number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def read_all(reader: TokenReader, between: Callable[[], None] = lambda: None) -> Seen:
    seen = Seen()
    for event in reader:
        seen.add(event)
        between()
    return seen


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


def test_nothing_is_published_when_nobody_reads(world: World) -> None:
    submit(world.jobs, world.spec)
    world.group().run()
    keys = ChunkQueue(world.client, MODEL, "x").keys
    assert not world.client.exists(keys.job(world.spec.job_id, "tokens"))
    world.end()


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


def tick_until(group: Group, events: Iterator[Event], seen: Seen, done: Callable[[], bool]) -> None:
    """Let the group and the reader work by turns."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            group.tick()
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    deadline = time.monotonic() + 10
    try:
        while not done():
            assert time.monotonic() < deadline, "the reader does not get on"
            seen.add(next(events))
    finally:
        stop.set()
        thread.join()


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


def test_messages_of_a_worker_that_lost_its_chunk_are_passed_over() -> None:
    texts = RowTexts(4)
    assert texts.apply(RowDelta(0, 0, 7, 0, "new")) == [RowStarted(0, 0), RowText(0, 0, 0, "new")]
    assert texts.apply(RowDelta(0, 0, 6, 0, "old text")) == []
    assert texts.apply(RowDelta(0, 0, 7, 3, "er")) == [RowText(0, 0, 3, "er")]
    assert texts.apply(RowDelta(0, 0, 8, 0, "x")) == [RowStarted(0, 0), RowText(0, 0, 0, "x")]


def test_repeated_and_overlapping_messages_add_nothing() -> None:
    texts = RowTexts(4)
    texts.apply(RowDelta(1, 0, 7, 0, "abc"))
    assert texts.apply(RowDelta(1, 0, 7, 0, "abc")) == []
    assert texts.apply(RowDelta(1, 0, 7, 0, "abcd")) == [RowText(1, 0, 3, "d")]
    assert texts.apply(RowDelta(1, 0, 7, 2, "cde")) == [RowText(1, 0, 4, "e")]
    assert texts.apply(RowDelta(1, 0, 7, 9, "z")) is None
    end = RowEnd("ok", "stop", 5, 1, 2, 3)
    assert texts.apply(RowDelta(1, 0, 7, 5, "", end)) == [RowFinished(1, 0, "ok", "stop", 2, 3, None)]
    assert texts.apply(RowDelta(1, 0, 7, 5, "", end)) == []
    assert list(texts.finish(RowResult(1, text="abcde"))) == []
    assert texts.missing() == [range(1), range(2, 4)]


def test_a_row_with_several_samples_is_missing_until_all_have_ended() -> None:
    texts = RowTexts(2)
    for sample in (2, 0):
        texts.apply(RowDelta(0, sample, 7, 0, "a", RowEnd("ok", "stop", 1, 3, 0, 1)))
    assert texts.missing(strict=True) == [range(2)]
    assert list(texts.finish(RowResult(0, sample_index=1, text="b")))[1] == RowText(0, 1, 0, "b")
    assert texts.missing(strict=True) == [range(1, 2)]
    texts.apply(RowDelta(1, 0, 7, 0, "a", RowEnd("ok", "stop", 1, 1, 0, 1)))
    assert texts.missing(strict=True) == []


def test_a_result_that_differs_from_the_streamed_text_starts_the_row_anew() -> None:
    texts = RowTexts(1)
    texts.apply(RowDelta(0, 0, 7, 0, "abc"))
    assert [type(event) for event in texts.finish(RowResult(0, text="abx"))] == [RowStarted, RowText, RowFinished]


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
