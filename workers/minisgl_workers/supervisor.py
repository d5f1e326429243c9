"""The supervisor of a worker group: keeps its processes running, and brings them to an end.

    starting --all ready--> serving --a process died or hangs--> (backoff) --> starting
    serving --first SIGTERM/SIGINT--> draining --the frontend left--> stopped; a second signal stops at once

Nothing is lost with a group: leases run out, and finished rows are in Redis. Knows nothing of what the processes do.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from minisgl_batch.child_process import ChildFailed, ChildPlan
from minisgl_batch.errors import WorkerError
from minisgl_workers.children import STABLE_AFTER_S, Children, backoff_s
from minisgl_workers.socket_directory import socket_directory

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0  # for processes whose work is done


@dataclass(frozen=True)
class GroupPlan:
    """What a worker group consists of.

    Attributes:
        children: its processes, given a private directory for their sockets. The first one is the frontend: it drains
            the group on SIGTERM, and ends when nothing is left to do.
        on_ready: called with the ready information of each process, by name, whenever all are ready.
        drain_s: how long the frontend lets what runs go on.
        drain_margin_s: how long it may take after that, for its last calls of Redis, which may be slow or away.
        hang_s: a process that has work and doesn't get on for so long is taken for hanging.
        max_failures: deaths in a row, with nothing done in between, after which the supervisor gives up.
    """

    children: Callable[[Path], Sequence[ChildPlan]]
    on_ready: Callable[[dict[str, dict[str, Any]]], None]
    drain_s: float
    hang_s: float
    drain_margin_s: float = 15.0
    max_failures: int = 8


class Supervisor:
    """Runs one group until it is told to stop. For the main thread."""

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
                with socket_directory() as directory:
                    children = Children(self._plan.children(directory), self._plan.hang_s)
                    failure = self._serve(children)
                if failure is None:
                    return
                if self._num_signals:
                    logger.error("%s while it was stopping; what was under way runs again elsewhere", failure.message)
                    return
                if children.has_delivered or time.monotonic() - started > STABLE_AFTER_S:
                    num_failures = 1
                elif not children.suspects:  # rows that kill their worker are found and given up: it takes some deaths
                    num_failures += 1
                if not self._was_ready or num_failures > self._plan.max_failures:
                    raise WorkerError(failure.message, exit_code=failure.exit_code)
                delay_s = backoff_s(max(1, num_failures))
                logger.error("%s; starting the group again in %.0f s", failure.message, delay_s)
                if self._sleep(delay_s):
                    return

    def _serve(self, children: Children) -> ChildFailed | None:
        """Start a group and watch it. None once it was stopped on purpose, else why it ended."""
        is_ready, num_signals, drained_by = False, self._num_signals, float("inf")
        try:
            children.start(self._wake_fd)
            while True:
                children.wait()
                if children.is_ready and not is_ready:
                    is_ready = self._was_ready = True
                    self._plan.on_ready(children.ready_info)
                if self._num_signals > num_signals:
                    os.read(self._wake_fd, 64)
                    num_signals = self._num_signals
                    if num_signals > 1 or not is_ready:
                        return None
                    logger.info("stopping: finishing or handing back what runs; a second signal stops at once")
                    children.drain()
                    drained_by = time.monotonic() + self._plan.drain_s + self._plan.drain_margin_s
                if children.failure is not None:
                    return children.failure
                if children.has_left:
                    return None if num_signals else ChildFailed("the frontend left", False, 1)
                if time.monotonic() > drained_by:
                    logger.error("the frontend did not come to an end; what was under way runs again elsewhere")
                    return None
        finally:
            children.stop(STOP_TIMEOUT_S if children.has_left and self._num_signals < 2 else 0.0)

    def _sleep(self, timeout_s: float) -> bool:
        """Wait; true when a signal came meanwhile."""
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
