"""The supervisor of a worker group: starts its processes, watches them, and starts them again when one dies.

    starting --all ready--> serving --a process died--> (backoff) --> starting
    serving --first SIGTERM/SIGINT--> draining --the frontend left--> stopped; a second signal stops at once

A group lives and dies as one, since ranks hold each other's state and the frontend's requests are in the ranks.
Nothing is lost with it: leases run out, and finished rows are in Redis. Knows nothing of what the processes do.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from minisgl_batch.child_process import ChildFailed, ChildProcess, ChildReady
from minisgl_batch.errors import WorkerError

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0  # a group that served this long begins its backoff anew
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class GroupPlan:
    """What a worker group consists of.

    Attributes:
        start: starts all processes, given a private directory for their sockets. The first one is the frontend: it
            drains the group on SIGTERM, and ends when nothing is left to do.
        on_ready: called with the ready information of each process, by name, whenever all are ready.
        max_failures: deaths in a row after which the supervisor gives up.
    """

    start: Callable[[Path], list[ChildProcess]]
    on_ready: Callable[[dict[str, dict[str, Any]]], None]
    max_failures: int = 8


class Supervisor:
    """Runs one group until it is told to stop."""

    def __init__(self, plan: GroupPlan) -> None:
        self._plan = plan
        self._num_signals = 0
        self._was_ready = False
        self._wake_fd = -1

    def run(self) -> None:
        """Serve until a signal.

        Raises:
            WorkerError: the group couldn't start, or died too often.
        """
        num_failures = 0
        with self._signals():
            while True:
                started = time.monotonic()
                with tempfile.TemporaryDirectory(prefix="minisgl-") as directory:
                    failure = self._run_group(Path(directory))
                if failure is None:
                    return
                num_failures = 1 if time.monotonic() - started > STABLE_AFTER_S else num_failures + 1
                if not self._was_ready or num_failures > self._plan.max_failures:
                    raise WorkerError(failure.message, exit_code=failure.exit_code)
                backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (num_failures - 1))
                logger.error("%s; starting the group again in %.0f s", failure.message, backoff_s)
                if self._wait_for_signal(backoff_s):
                    return

    def _run_group(self, directory: Path) -> ChildFailed | None:
        """Start a group and watch it. None once it was stopped on purpose, else why it ended."""
        children = self._plan.start(directory)
        frontend = children[0]
        ready: dict[str, dict[str, Any]] = {}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_fd, selectors.EVENT_READ)
                for child in children:
                    selector.register(child.status_fd, selectors.EVENT_READ, child)
                while True:
                    for key, _ in selector.select():
                        child = key.data
                        if child is None:
                            os.read(self._wake_fd, 64)
                            if self._num_signals > 1 or len(ready) < len(children):
                                return None
                            logger.info("stopping: finishing or handing back what runs; a second signal stops at once")
                            frontend.send_signal(signal.SIGTERM)
                            continue
                        match child.read_status():
                            case ChildReady(info):
                                ready[child.name] = info
                                if len(ready) == len(children):
                                    self._was_ready = True
                                    self._plan.on_ready(ready)
                            case ChildFailed() as failure:
                                return failure
                            case None:
                                if child is frontend and self._num_signals:
                                    return None
                                return ChildFailed(f"{child.name} {child.describe_end()}", expected=False, exit_code=1)
        finally:
            for child in children:
                child.stop(STOP_TIMEOUT_S if self._num_signals == 1 else 0.0)

    def _wait_for_signal(self, timeout_s: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Count SIGTERM and SIGINT, and make `_wake_fd` readable when one comes."""
        self._wake_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)

        def count(_number: int, _frame: FrameType | None) -> None:
            self._num_signals += 1

        previous = {number: signal.signal(number, count) for number in (signal.SIGTERM, signal.SIGINT)}
        previous_fd = signal.set_wakeup_fd(write_fd)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(self._wake_fd)
            os.close(write_fd)
