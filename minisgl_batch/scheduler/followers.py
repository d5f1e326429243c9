"""The followers of a rank 0 that lives in this process: child processes, watched by a thread.

When one fails or dies, collectives that wait for it are ended, and the caller learns which one it was and why. They die
with this process, however it ends. Called by `scheduler.local`.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl_batch.child_process import ChildBeat, ChildFailed, ChildProcess
from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.place import FOLLOWER, FollowerConfig, places_on_this_host
from minisgl_batch.errors import MiniSGLError, RankLostError, WorkerError
from minisgl_batch.scheduler.rank import Links, join

logger = logging.getLogger(__name__)

LOOK_S = 1.0
SILENT_S = 30.0  # far more than a follower can be kept from its signs of life by its own work or by a busy machine
SETTLE_S = 5.0  # an error's effects on other ranks may be seen before the error: by so much at most
# The caller's own program may use all processors, and its output is its own.
_ENV = {"OMP_WAIT_POLICY": "passive", "MINISGL_LOG_LEVEL": "WARNING"}


class Followers:
    """Ranks 1 and up of a group, started at once."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minisgl-")
        places = places_on_this_host(config.tp, Path(self._folder.name))
        self._place = places[0]
        env = {name: value for name, value in _ENV.items() if name not in os.environ}
        self._children = [
            ChildProcess(f"rank {place.rank}", FOLLOWER, FollowerConfig(config, place), env) for place in places[1:]
        ]
        self._links: Links | None = None
        self._failed: Future[str] = Future()
        self._echo: tuple[str, float] | None = None  # a failure that another one brought about, and when
        self._heard: dict[ChildProcess, float] = {}  # when those that serve last gave a sign of life
        self._wake_fd, self._stop_fd = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="followers", daemon=True)
        self._watcher.start()

    def join(self, config: EngineConfig) -> Links:
        """Meet the followers, as rank 0.

        Raises:
            WorkerError: a follower failed first.
        """
        joined: Future[Links] = Future()

        def run() -> None:
            try:
                joined.set_result(join(config, self._place))
            except BaseException as error:  # noqa: BLE001 - it goes on in the caller's thread
                joined.set_exception(error)

        # In a thread of its own, which is left behind if a follower never comes.
        threading.Thread(target=run, name="join", daemon=True).start()
        either: list[Future[Any]] = [joined, self._failed]
        wait(either, return_when=FIRST_COMPLETED)
        if not joined.done():
            raise WorkerError(self._failed.result())
        self._links = joined.result()
        if self._failed.done():  # just now: nobody has ended the group's collectives
            self._links.tp.abort()
        return self._links

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Around what rank 0 does with the others: raises the error of a follower in place of what came of it.

        An error that rank 0 finds by itself, such as an option that no rank takes, comes of nothing.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, RankLostError):
                wait([self._failed], timeout=SETTLE_S + 1)
            elif isinstance(error, MiniSGLError):
                raise
            if not self._failed.done():
                raise
            raise WorkerError(self._failed.result()) from error
        if self._failed.done():
            raise WorkerError(self._failed.result())

    def stop(self) -> None:
        """End all followers."""
        os.write(self._stop_fd, b"x")
        self._watcher.join()
        for child in self._children:
            child.stop(0.0)
        os.close(self._wake_fd)
        os.close(self._stop_fd)
        self._folder.cleanup()

    def _watch(self) -> None:
        """Wait for the first failure, or for `stop`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            for child in self._children:
                selector.register(child.status_fd, selectors.EVENT_READ, child)
            while not self._failed.done():
                looked = time.monotonic()
                events = selector.select(LOOK_S)
                pause_s = time.monotonic() - looked
                if pause_s > LOOK_S + 1:  # this process was stopped, or its host slept: it heard nothing meanwhile
                    self._heard = {child: at + pause_s for child, at in self._heard.items()}
                for key, _ in events:
                    if key.fd == self._wake_fd:
                        return
                    if not self._take_statuses(key.data):
                        selector.unregister(key.fd)
                self._find_hanging()
                if self._echo is not None and time.monotonic() > self._echo[1] + SETTLE_S:
                    self._fail(self._echo[0])

    def _take_statuses(self, child: ChildProcess) -> bool:
        """What a follower has said since; False once that was its last word."""
        while True:
            match child.read_status():
                case ChildBeat():
                    self._heard[child] = time.monotonic()
                case ChildFailed() as failure:
                    self._heard.pop(child, None)
                    message = f"{child.name}: {failure.message}"
                    if failure.is_echo:
                        self._echo = self._echo or (message, time.monotonic())
                    else:
                        self._fail(message)
                    return False
                case None:
                    self._fail(f"{child.name} {child.describe_end()}")
                    return False
                case _:
                    pass  # it is ready
            if not child.has_more:
                return True

    def _find_hanging(self) -> None:
        for child, at in self._heard.items():
            if time.monotonic() - at > SILENT_S:
                self._fail(f"{child.name} hangs: silent for {SILENT_S:.0f} s")

    def _fail(self, message: str) -> None:
        """The first one counts, and ends the others: ranks that wait for each other don't see that a third is gone."""
        if self._failed.done():
            return
        self._failed.set_result(message)
        if self._links is not None:
            self._links.tp.abort()
        for child in self._children:
            child.send_signal(signal.SIGKILL)
