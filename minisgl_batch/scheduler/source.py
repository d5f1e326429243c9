"""Where a scheduler's messages come from and go to.

In-process (`LLM`) they are plain objects in lists; in a worker group they are bytes on ZeroMQ (`minisgl_workers.rank`).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from minisgl_batch.messages import FromEngine, ToEngine


class MessageSource(Protocol):
    """The scheduler's side of the channel to a frontend."""

    def receive(self, *, block: bool) -> list[ToEngine]:
        """All messages that have come; with `block`, waits without limit until there is one."""

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
