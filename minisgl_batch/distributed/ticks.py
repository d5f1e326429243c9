"""Each tick's messages from rank 0 to its followers, as bytes: one message a tick, in order, none lost.

One PUSH/PULL pair per follower over ZeroMQ, without a high-water mark. A follower waits without any limit: between two
jobs nothing may come for days. Ticks are numbered, so a lost one ends the group instead of letting the ranks run apart.
Knows nothing of what the bytes say; used by the scheduler's sources.
"""

from __future__ import annotations

import struct

import zmq
from torch._C._distributed_c10d import Store

from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.rendezvous import own_address, shared_folder
from minisgl_batch.errors import RankLostError

_NUMBER = struct.Struct("<q")


class TickSender:
    """Rank 0's end."""

    def __init__(self, place: RankPlace, store: Store) -> None:
        """Returns when every follower has told the store where it listens."""
        self._context = zmq.Context()
        self._followers = []
        self._next = 0
        for rank in range(1, place.size):
            follower = self._context.socket(zmq.PUSH)
            follower.set_hwm(0)
            follower.connect(store.get(_key(rank)).decode())
            self._followers.append(follower)

    def send(self, payload: bytes) -> None:
        """The next tick, to every follower; never waits for one."""
        message = _NUMBER.pack(self._next) + payload
        self._next += 1
        for follower in self._followers:
            follower.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close when what is queued is sent, or after a second: a follower that is gone takes nothing."""
        self._context.destroy(linger=1000)


class TickReceiver:
    """A follower's end.

    Attributes:
        progress: how many ticks have come; None while it waits for one. May be read from another thread.
    """

    def __init__(self, place: RankPlace, store: Store) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        folder = shared_folder(place)
        self._inbox.bind(f"tcp://{own_address(place)}:*" if folder is None else f"ipc://{folder}/rank{place.rank}")
        self._next = 0
        self.progress: int | None = None
        store.set(_key(place.rank), self._inbox.getsockopt_string(zmq.LAST_ENDPOINT))

    def receive(self) -> bytes:
        """The next tick; waits for it without limit.

        Raises:
            RankLostError: a tick is missing.
        """
        self.progress = None
        message = self._inbox.recv()
        (number,) = _NUMBER.unpack_from(message)
        if number != self._next:
            raise RankLostError(f"tick {number} came in place of tick {self._next}: the connection to rank 0 broke")
        self._next += 1
        self.progress = self._next
        return message[_NUMBER.size :]

    def close(self) -> None:
        self._context.destroy(linger=0)


def _key(rank: int) -> str:
    return f"ticks/{rank}"
