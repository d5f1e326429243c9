"""A job with known tokens, a group that makes them, and readers that are checked as they read.

The pauses are the pace of the engine and of the caller; nothing waits for an outcome by them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from minisgl_jobs.connection import connect
from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue, Lease
from minisgl_jobs.model import JobSpec, JobState, RowResult
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import Event, JobChanged, TokenReader
from minisgl_jobs.row_texts import RowFinished, RowStarted, RowText
from minisgl_jobs.streams import RowDelta, RowEnd, TokenPublisher
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, complete, end_all, make_spec


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
                self.queue.spool(lease, {(row, 0): b"result"}, num_rows=1)
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
