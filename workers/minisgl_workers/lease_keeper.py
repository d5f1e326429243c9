"""Renews a group's leases in a thread of its own, so that nothing else that the frontend does holds renewals up.

A group that hangs is ended by its supervisor, and its leases with it. Knows nothing of what is in the chunks. Owned by
`delivery`.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from minisgl_batch.errors import QueueError
from minisgl_jobs.leases import ChunkQueue, Lease, Renewal

logger = logging.getLogger(__name__)

RENEW_S = 1.0
HURRY_S = 0.01


class LeaseKeeper:
    """The leases of one group, for its main thread and the one that renews them."""

    def __init__(self, queue: ChunkQueue) -> None:
        """`queue` is for the keeper alone."""
        self._queue = queue
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}  # by token
        self._until: dict[str, float] = {}  # token -> when the lease runs out, on the local clock
        self._news: list[tuple[Lease, Renewal]] = []
        self._run_id = ""
        self._saw_another = False
        self._is_away = False
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leases")
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Begin to renew."""
        self._running = self._thread.submit(self._run)

    def stop(self) -> None:
        """Renew no more."""
        self._stopping.set()
        self._hurry.set()
        self._thread.shutdown()

    def add(self, lease: Lease, asked: float) -> None:
        """Keep a lease that was asked for at a time of the monotonic clock."""
        with self._lock:
            self._leases[lease.token] = lease
            self._until[lease.token] = asked + self._queue.lease_s

    def remove(self, lease: Lease) -> None:
        """Let a lease go."""
        with self._lock:
            self._leases.pop(lease.token, None)
            self._until.pop(lease.token, None)

    def holds(self, lease: Lease) -> bool:
        """Whether nobody else can have the chunk at this moment: not so in a process that was stopped for long."""
        return time.monotonic() < self._until.get(lease.token, 0.0)

    def look_for_pause(self) -> None:
        """When a lease has run out, as in a process that was stopped for a while, find out at once whose it is now."""
        now = time.monotonic()
        if any(now >= until for until in list(self._until.values())):
            self._hurry.set()

    def news(self) -> list[tuple[Lease, Renewal]]:
        """Leases that are lost or whose job is being canceled, since the last call.

        Raises:
            Exception: what ended the thread; a defect.
        """
        if self._running is not None and self._running.done():
            self._running.result()
        with self._lock:
            news, self._news = self._news, []
        return news

    def saw_another_server(self) -> bool:
        """Whether Redis has restarted, or another server took its place, since the last call: its last writes may be
        lost."""
        saw, self._saw_another = self._saw_another, False
        return saw

    def renew(self) -> None:
        """Renew all once.

        Raises:
            RedisUnavailableError: Redis stayed away.
        """
        with self._lock:
            leases = list(self._leases.values())
        run_id = self._queue.server_run_id() if leases else self._run_id
        asked = time.monotonic()
        answers = self._queue.renew(leases)
        self._saw_another |= run_id != self._run_id and self._run_id != ""
        self._run_id = run_id
        with self._lock:
            for lease, answer in zip(leases, answers, strict=True):
                if answer is not Renewal.OK:
                    self._news.append((lease, answer))
                if answer is not Renewal.LOST and lease.token in self._leases:
                    self._until[lease.token] = asked + self._queue.lease_s

    def _run(self) -> None:
        while True:
            if self._hurry.wait(min(RENEW_S, self._queue.lease_s / 3)):
                self._hurry.clear()
                time.sleep(HURRY_S)  # not more often than that while Redis is away
            if self._stopping.is_set():
                return
            self._try_to_renew()

    def _try_to_renew(self) -> None:
        try:
            self.renew()
        except QueueError as error:
            if not self._is_away:
                logger.warning("leases can't be renewed at the moment: %s", error)
            self._is_away = True
        else:
            self._is_away = False
