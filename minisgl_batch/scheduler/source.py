"""Where a scheduler's messages come from and go to.

In-process (`LLM`) they are plain objects in lists; in a worker group they are bytes on ZeroMQ (`minisgl_workers.rank`).
With several ranks, rank 0 passes on what it receives in each tick, so that all ranks' schedulers decide the same.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from minisgl_batch.distributed.ticks import TickReceiver, TickSender
from minisgl_batch.messages import FromEngine, ToEngine, encoder, tick_decoder


class MessageSource(Protocol):
    """The scheduler's side of the channel to a frontend."""

    def receive(self, *, block: bool) -> list[ToEngine]:
        """All messages that have come; with `block`, waits for one, without limit unless it has other things to do."""

    def send(self, message: FromEngine) -> None:
        """Hand a message to the frontend; never waits for it."""


class LocalSource:
    """Messages of a caller in the same thread, which fills `inbox` and empties `outbox` between ticks."""

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.outbox: deque[FromEngine] = deque()

    def receive(self, *, block: bool) -> list[ToEngine]:
        if block and not self.inbox:
            raise RuntimeError("the engine is idle and nobody can give it work: it shares the caller's thread")
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)


class LeaderSource:
    """Rank 0's: a frontend's messages, which the followers get too, one message a tick."""

    def __init__(self, frontend: MessageSource, followers: TickSender) -> None:
        self._frontend = frontend
        self._followers = followers

    def receive(self, *, block: bool) -> list[ToEngine]:
        messages = self._frontend.receive(block=block)
        self._followers.send(encoder.encode(messages))
        return messages

    def send(self, message: FromEngine) -> None:
        self._frontend.send(message)


class FollowerSource:
    """A follower's: what rank 0 received in the same tick. What a follower has to say, rank 0 says."""

    def __init__(self, leader: TickReceiver) -> None:
        self._leader = leader

    def receive(self, *, block: bool) -> list[ToEngine]:
        """The tick's messages, perhaps none; always waits for the tick."""
        del block
        return tick_decoder.decode(self._leader.receive())

    def send(self, message: FromEngine) -> None:
        del message
