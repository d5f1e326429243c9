"""The reading end of a job's tokens: every token once, whenever the reader comes and however slowly it reads.

It announces itself, subscribes, replays the stream, drops what it has and fills gaps from the stream; where that was
trimmed it asks the workers for snapshots of running rows and its caller for finished ones. Knows nothing of Parquet.
Called by clients and the command line; `streams.py` is the sending end.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import redis

from minisgl_batch.errors import DamagedJobError, JobNotFoundError, RedisUnavailableError
from minisgl_jobs.keys import EVENTS
from minisgl_jobs.model import JobState, RowResult
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.row_texts import RowEvent, RowTexts
from minisgl_jobs.scripts import redis_errors
from minisgl_jobs.status import reading_record
from minisgl_jobs.streams import WATCH_TTL_S, message_decoder

logger = logging.getLogger(__name__)

OUTAGE_S = 120.0  # how long a reader puts up with a Redis that is away
RESYNC_S = 1.0  # at least so long between requests for snapshots
LOOK_S = 3.0
STOP_S = 0.5  # how long `stop` may go unnoticed
RECONNECT_S = 0.2
READ_MESSAGES = 100  # from the stream, in one call

FetchRows: TypeAlias = Callable[[Sequence[range]], Iterable[RowResult]]
"""Finished results of the rows in these ascending ranges, as far as there are any (committed parts, spools)."""


class JobChanged(msgspec.Struct, frozen=True):
    """The job is in another state now. A final one is a reader's last event."""

    state: JobState


Event: TypeAlias = RowEvent | JobChanged


class TokenReader:
    """Iterate over it once: RowStarted, RowText, RowFinished of all rows as they come, and JobChanged.

    The texts of a sample since its last RowStarted, put together, are its text. The iteration ends with the job.

    Raises (while iterating):
        JobNotFoundError: there is no such job (any more).
        RedisUnavailableError: Redis stayed away for `outage_s`.
    """

    def __init__(
        self,
        client: redis.Redis,
        job_id: str,
        fetch_rows: FetchRows,
        *,
        rows: Collection[int] | None = None,
        outage_s: float = OUTAGE_S,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            client: a connection to Redis.
            job_id: the job.
            fetch_rows: where finished rows are found that the stream doesn't hold (any more).
            rows: only these; by default all.
            outage_s: how long to wait for a Redis that is away.
            on_look: called every LOOK_S while the job goes on: to help one that no worker looks after.
        """
        queue = JobQueue(client)
        self._client = client
        self._job_id = job_id
        self._fetch_rows = fetch_rows
        self._outage_s = outage_s
        self._on_look = on_look
        self._keys = queue.find(job_id)
        self._texts = RowTexts(queue.status(job_id).spec.num_rows, rows)
        self._pubsub: Any = None
        self._state: JobState | None = None
        self._last = b""  # id of the last message, b"" before the first
        self._watch_until = 0.0  # when to refresh the watch
        self._look_at = 0.0  # when to look at the job's state, should its message be lost
        self._resync_at: float | None = None
        self._resynced = 0.0
        self._sweep_due = True
        self._away_since: float | None = None
        self._is_warned = False
        self.is_stopped = False

    def stop(self) -> None:
        """End the iteration within STOP_S; may be called by another thread than the one that iterates."""
        self.is_stopped = True

    def announce(self) -> None:
        """Tell the workers that somebody reads. Iterating does; call it before `JobQueue.seal` to miss nothing."""
        with redis_errors():
            self._client.set(self._keys.job(self._job_id, "watch"), secrets.token_hex(8), px=int(WATCH_TTL_S * 1000))
        now = time.monotonic()
        self._watch_until = now + WATCH_TTL_S / 3
        self._resync_at, self._resynced = None, now

    def __iter__(self) -> Iterator[Event]:
        try:
            while not self._is_over():
                yield from self._session()
        finally:
            self.close()

    def close(self) -> None:
        """Drop the subscription; the workers notice within WATCH_TTL_S."""
        if self._pubsub is not None:
            self._pubsub.close()
            self._pubsub = None

    def _session(self) -> Iterator[Event]:
        """Follow the job to its end, or until Redis goes away."""
        try:
            self._connect()
            self._away_since = None
            yield from self._follow()
        except RedisUnavailableError:
            now = time.monotonic()
            self._away_since = self._away_since or now
            if now - self._away_since > self._outage_s:
                raise
            time.sleep(RECONNECT_S)

    def _connect(self) -> None:
        """Subscribe first and look at the stream later, so that nothing falls between the two."""
        self.close()
        client: Any = self._client
        with redis_errors():
            self._pubsub = client.pubsub()
            self._pubsub.subscribe(self._keys.job(self._job_id, EVENTS))
            if self._pubsub.get_message(timeout=WATCH_TTL_S) is None:
                raise RedisUnavailableError("Redis does not confirm a subscription")
        self.announce()
        self._sweep_due = True

    def _follow(self) -> Iterator[Event]:
        yield from self._catch_up()
        yield from self._change()
        while not self._is_over():
            if self._sweep_due:
                self._sweep_due = False
                yield from self._sweep(self._texts.missing())
            deadline = min(self._watch_until, self._look_at, self._resync_at or self._look_at)
            with redis_errors():
                message = self._pubsub.get_message(timeout=min(STOP_S, max(0.001, deadline - time.monotonic())))
            if message is not None:
                yield from self._receive(message)
            if self._resync_at is not None and time.monotonic() >= self._resync_at:
                self.announce()
            self._refresh()
            if time.monotonic() >= self._look_at:
                self._on_look()
                yield from self._change()

    def _is_over(self) -> bool:
        return self.is_stopped or (self._state is not None and self._state.is_final)

    def _receive(self, message: dict[str, Any]) -> Iterator[Event]:
        if message["type"] != "message":  # the client library has lost its connection and subscribed again
            yield from self._catch_up()
            yield from self._change()
            return
        kind, _, rest = message["data"].partition(b" ")
        if kind == b"state":
            yield from self._change()
            return
        previous, _, rest = rest.partition(b" ")
        id_, _, content = rest.partition(b" ")
        if kind != b"tokens":
            self._pass_over(message["channel"].decode(errors="backslashreplace"))
        elif previous == self._last:
            self._last = id_
            yield from self._apply(content)
        elif previous == b"0-0" and self._last:  # the stream began anew: it had expired, or Redis has lost it
            self._last = b""
            self._gap()
            yield from self._catch_up()
        else:  # an old message, or some are missing before it
            yield from self._catch_up()

    def _catch_up(self) -> Iterator[Event]:
        """Read the stream from where this reader is to its end."""
        stream = self._keys.job(self._job_id, "tokens")
        entries: Any = [None]
        while entries:
            start = b"(" + self._last if self._last else "-"
            with reading_record(stream), redis_errors():
                entries = self._client.xrange(stream, min=start, count=READ_MESSAGES)
            for id_, fields in entries:
                if self._last and fields.get(b"previous", self._last) != self._last:
                    self._gap()
                self._last = id_  # of a foreign entry, too: the next one of ours follows it
                yield from self._apply(fields.get(b"message", b""))
            self._refresh()

    def _apply(self, data: bytes) -> Iterator[Event]:
        """The events of a message; none of an entry of others, who may write to the same Redis."""
        stream = self._keys.job(self._job_id, "tokens")
        try:
            with reading_record(stream):
                message = message_decoder.decode(data)
        except DamagedJobError:
            self._pass_over(stream)
            return
        for delta in message.rows:
            events = self._texts.apply(delta)
            if events is None:
                self._gap()
            else:
                yield from events
        # Rows may have ended before the workers noticed this reader: they are among the finished ones now.
        self._sweep_due |= message.is_snapshot

    def _pass_over(self, key: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning("%s in Redis holds entries that minisgl-batch didn't write: they are passed over", key)

    def _gap(self) -> None:
        """Messages are lost: ask for snapshots of what runs, but not with every message."""
        if self._resync_at is None:
            self._resync_at = max(time.monotonic(), self._resynced + RESYNC_S)

    def _sweep(self, missing: Sequence[range]) -> Iterator[Event]:
        """Fetch finished rows that this reader hasn't got."""
        for result in self._fetch_rows(missing) if missing else ():
            yield from self._texts.finish(result)
            self._refresh()

    def _change(self) -> Iterator[Event]:
        """Look at the job's state. Messages only say that it has changed: they may be late."""
        state = self._read_state()
        self._look_at = time.monotonic() + LOOK_S
        if state is self._state:
            return
        if state.is_final:
            yield from self._catch_up()
            yield from self._sweep(self._texts.missing(strict=True))
        self._state = state
        yield JobChanged(state)

    def _read_state(self) -> JobState:
        with redis_errors():
            state: Any = self._client.hget(self._keys.job(self._job_id), "state")
        if state is None:
            raise JobNotFoundError(f"job {self._job_id} has expired")
        return JobState(state.decode())

    def _refresh(self) -> None:
        """Keep the watch alive. Called often: the caller may take its time with each event."""
        if time.monotonic() < self._watch_until:
            return
        with redis_errors():
            alive = self._client.pexpire(self._keys.job(self._job_id, "watch"), int(WATCH_TTL_S * 1000))
        self._watch_until = time.monotonic() + WATCH_TTL_S / 3
        if not alive:  # this reader was too slow, or Redis has lost it: the workers have stopped sending
            self.announce()
