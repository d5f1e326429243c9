"""Tokens on their way to readers: the messages, and the publisher in a worker group.

A job's messages go into a capped Redis Stream and, with equal content, to a pub/sub channel; nothing is sent while
nobody reads. All offsets count characters, so that a message may arrive twice or late without harm. Knows nothing of
engines or detokenizing. Called by frontends; `reader.py` is the other end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import redis

from minisgl_batch.errors import DamagedJobError, QueueError, RedisFullError, RedisUnavailableError
from minisgl_batch.reasoning import Reasoning
from minisgl_jobs.keys import QueueKeys, queue_name
from minisgl_jobs.model import RowError
from minisgl_jobs.scripts import Scripts, redis_errors

logger = logging.getLogger(__name__)

WATCH_TTL_S = 10.0  # a reader is gone when it hasn't refreshed its watch for so long
STREAM_TTL_S = 300.0  # of the last message
MAX_STREAM_MESSAGES = 1000
MAX_MESSAGE_CHARS = 1 << 18  # larger ones, such as snapshots of many rows, are cut
POLL_S = 0.01  # how long a new reader may go unnoticed: short answers have ended by then
AFTER_FAILURE_S = 1.0


class RowEnd(msgspec.Struct, frozen=True, array_like=True):
    """How a sample ended.

    Attributes:
        num_chars: of its whole text.
        num_samples: how many samples its row has.
        custom_id: the row's own name, "" when it has none.
    """

    status: Literal["ok", "error"]
    finish_reason: str
    num_chars: int
    num_samples: int
    prompt_tokens: int
    completion_tokens: int
    error: RowError | None = None
    custom_id: str = ""


class RowDelta(msgspec.Struct, frozen=True, array_like=True):
    """New text of one sample.

    Attributes:
        attempt: of the lease that generates it; a larger one starts the sample anew.
        offset: characters of its text before this.
        text: may be "" when it only ends.
        reasoning: where the parts of the text so far are, if it is to be split.
        end: set in its last message. Publish it when the result is safe (spooled): readers take it as final.
    """

    row_index: int
    sample_index: int
    attempt: int
    offset: int
    text: str
    end: RowEnd | None = None
    reasoning: Reasoning | None = None


class TokenMessage(msgspec.Struct, frozen=True, array_like=True):
    """What one job's rows got in one tick.

    Attributes:
        is_snapshot: with this message, the text so far of all rows that run in this group has been sent.
    """

    rows: list[RowDelta]
    is_snapshot: bool = False


message_decoder = msgspec.msgpack.Decoder(TokenMessage)
_encoder = msgspec.msgpack.Encoder()


class TokenPublisher:
    """A worker group's sending end. Per tick: `poll`, then `add` what is new of watched jobs, then `flush`.

    Never raises for a Redis that is away or full: what can't be sent is dropped, and the readers get snapshots later.
    """

    def __init__(self, client: redis.Redis, model: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._scripts = Scripts(client)
        self._keys = QueueKeys(queue_name(model))
        self._clock = clock
        self._watches: dict[str, bytes] = {}  # watched job -> watch that its readers have snapshots for
        self._unwatched: set[str] = set()
        self._buffers: dict[str, list[RowDelta]] = {}
        self._snapshots: set[str] = set()
        self._unsendable: set[str] = set()  # jobs whose stream isn't ours
        self._next_poll = 0.0
        self._quiet_until = 0.0

    def poll(self, jobs: Iterable[str]) -> set[str]:
        """Look for readers of the jobs that have rows in this group; cheap enough for every tick.

        Returns:
            Jobs with a reader that hasn't seen what their rows have: `add` the whole text so far of each running row
            (offset 0) in this tick.
        """
        now, active = self._clock(), set(jobs)
        if now < self._quiet_until:
            return set()
        known = self._watches.keys() | self._unwatched
        for job in known - active:
            self._watches.pop(job, None)
            self._unwatched.discard(job)
            self._unsendable.discard(job)
        if now >= self._next_poll:
            self._next_poll = now + POLL_S
            return self._look(sorted(active))
        return self._look(sorted(active - known))

    def is_watched(self, job: str) -> bool:
        """Whether somebody reads the job's tokens."""
        return job in self._watches

    def add(self, job: str, delta: RowDelta) -> None:
        """Send this at the end of the tick; passed over when the job isn't watched."""
        if job in self._watches:
            self._buffers.setdefault(job, []).append(delta)

    def flush(self) -> None:
        """Send what was added: one message for each job, more only for large snapshots."""
        buffers, self._buffers = self._buffers, {}
        snapshots, self._snapshots = self._snapshots, set()
        try:
            for job in snapshots | buffers.keys():
                self._send(job, buffers.get(job, []), is_snapshot=job in snapshots)
        except (RedisFullError, RedisUnavailableError) as error:
            self._give_up(error)

    def _look(self, jobs: list[str]) -> set[str]:
        if not jobs:
            return set()
        try:
            with redis_errors():
                found: list[Any] = self._client.mget([self._keys.job(job, "watch") for job in jobs])
        except RedisUnavailableError as error:
            self._give_up(error)
            return set()
        for job, watch in zip(jobs, found, strict=True):
            if watch is None:
                self._watches.pop(job, None)
                self._unwatched.add(job)
            elif self._watches.get(job) != watch:
                self._watches[job] = watch
                self._unwatched.discard(job)
                self._snapshots.add(job)
        return self._snapshots & self._watches.keys()

    def _send(self, job: str, deltas: list[RowDelta], *, is_snapshot: bool) -> None:
        parts: list[list[RowDelta]] = [[]]
        num_chars = 0
        for delta in deltas:
            if parts[-1] and num_chars + len(delta.text) > MAX_MESSAGE_CHARS:
                parts.append([])
                num_chars = 0
            parts[-1].append(delta)
            num_chars += len(delta.text)
        for part in parts:
            message = _encoder.encode(TokenMessage(part, is_snapshot and part is parts[-1]))
            limits = (MAX_STREAM_MESSAGES, int(STREAM_TTL_S * 1000))
            try:
                self._scripts.run("publish", self._keys.prefix, job, message, *limits)
            except DamagedJobError as error:
                if job not in self._unsendable:
                    self._unsendable.add(job)
                    logger.warning("nobody can read the tokens of job %s: %s", job, error)
                return

    def _give_up(self, error: QueueError) -> None:
        """Forget who watches, so that the next look finds them as new and in need of snapshots."""
        logger.warning("tokens were not published, readers get them later: %s", error)
        self._watches.clear()
        self._unwatched.clear()
        self._buffers.clear()
        self._snapshots.clear()
        self._quiet_until = self._clock() + AFTER_FAILURE_S
