"""The sockets between a frontend and rank 0: typed messages as MessagePack over ZeroMQ.

Each side binds its own inbox, a unix socket in the group's private directory, and connects to the other's (which may
be bound later). No message is ever dropped: there is no high-water mark, and PUSH queues until the peer is there.
"""

from __future__ import annotations

from pathlib import Path

import zmq

from minisgl_batch.messages import FromEngine, ToEngine, encoder, from_engine_decoder, to_engine_decoder


class _Link:
    """One PULL inbox and one PUSH to the peer's inbox."""

    def __init__(self, inbox: Path, peer: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(f"ipc://{inbox}")
        self._peer = self._context.socket(zmq.PUSH)
        self._peer.set_hwm(0)
        self._peer.connect(f"ipc://{peer}")

    def _receive_all(self, timeout_ms: int | None) -> list[bytes]:
        """Everything that has come; waits for the first message up to the time-out (None: without limit)."""
        messages: list[bytes] = []
        if self._inbox.poll(timeout_ms):
            try:
                while True:
                    messages.append(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                pass
        return messages

    def close(self, linger_ms: int = 1000) -> None:
        """Send what is queued, for at most `linger_ms`, and close."""
        self._inbox.close(0)
        self._peer.close(linger_ms)
        self._context.term()


class EngineSide(_Link):
    """Rank 0's end; a scheduler's MessageSource.

    Attributes:
        progress: how often the scheduler has looked for messages, which it does before each step; None while it waits
            for one, having nothing else to do. May be read from another thread.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(inbox=directory / "rank0", peer=directory / "frontend")
        self.progress: int | None = None
        self._num_looks = 0

    def receive(self, *, block: bool) -> list[ToEngine]:
        self._num_looks += 1
        self.progress = None if block else self._num_looks
        received = self._receive_all(None if block else 0)
        self.progress = self._num_looks
        return [to_engine_decoder.decode(raw) for raw in received]

    def send(self, message: FromEngine) -> None:
        self._peer.send(encoder.encode(message))


class FrontendSide(_Link):
    """The frontend's end."""

    def __init__(self, directory: Path) -> None:
        super().__init__(inbox=directory / "frontend", peer=directory / "rank0")

    def receive(self, timeout_s: float | None) -> list[FromEngine]:
        """All messages that have come; waits up to `timeout_s` for the first (None: without limit)."""
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
        return [from_engine_decoder.decode(raw) for raw in self._receive_all(timeout_ms)]

    def send(self, message: ToEngine) -> None:
        self._peer.send(encoder.encode(message))
