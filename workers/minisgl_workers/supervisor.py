"""The supervisor of a worker group: keeps its processes running, and brings them to an end.

    starting --all ready--> serving --a process died or hangs--> (backoff) --> starting
    serving --first SIGTERM/SIGINT--> draining --the frontend left--> stopped; a second signal stops at once

Nothing is lost with a group: leases run out, and finished rows are in Redis. Knows nothing of what the processes do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_batch.child_process import ChildFailed, ChildPlan
from minisgl_workers.children import FIRST_BACKOFF_S, STABLE_AFTER_S, Children, backoff_s
from minisgl_workers.signals import StopSignals
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
        first_backoff_s: how long to wait after a death; twice as long after each that follows with nothing done.
        max_failures: deaths in a row, with nothing done in between, after which the supervisor gives up.
    """

    children: Callable[[Path], Sequence[ChildPlan]]
    on_ready: Callable[[dict[str, dict[str, Any]]], None]
    drain_s: float
    hang_s: float
    drain_margin_s: float = 15.0
    first_backoff_s: float = FIRST_BACKOFF_S
    max_failures: int = 8


class Supervisor:
    """Runs one group until it is told to stop. For the main thread."""

    def __init__(self, plan: GroupPlan) -> None:
        self._plan = plan
        self._signals = StopSignals()
        self._was_ready = False

    def run(self) -> None:
        """Serve until a signal.

        Raises:
            WorkerError: the group couldn't start, or died too often.
        """
        num_failures = 0
        with self._signals:
            while True:
                started = time.monotonic()
                with socket_directory() as directory:
                    children = Children(self._plan.children(directory), self._plan.hang_s, self._plan.first_backoff_s)
                    failure = self._serve(children)
                if failure is None:
                    return
                if self._signals.count:
                    logger.error("%s while it was stopping; what was under way runs again elsewhere", failure.message)
                    return
                if children.has_delivered or time.monotonic() - started > STABLE_AFTER_S:
                    num_failures = 1
                elif not children.suspects:  # rows that kill their worker are found and given up: it takes some deaths
                    num_failures += 1
                if not self._was_ready or num_failures > self._plan.max_failures:
                    raise failure.error()
                delay_s = backoff_s(max(1, num_failures), self._plan.first_backoff_s)
                logger.error("%s; starting the group again in %g s", failure.message, delay_s)
                if self._signals.sleep(delay_s):
                    return

    def _serve(self, children: Children) -> ChildFailed | None:
        """Start a group and watch it. None once it was stopped on purpose, else why it ended."""
        is_ready, num_signals, drained_by = False, self._signals.count, float("inf")
        try:
            children.start(self._signals.fd)
            while True:
                children.wait()
                if children.is_ready and not is_ready:
                    is_ready = self._was_ready = True
                    self._plan.on_ready(children.ready_info)
                if self._signals.count > num_signals:
                    self._signals.clear()
                    num_signals = self._signals.count
                    if num_signals > 1 or not is_ready:
                        return None
                    logger.info("stopping: finishing or handing back what runs; a second signal stops at once")
                    children.drain()
                    drained_by = time.monotonic() + self._plan.drain_s + self._plan.drain_margin_s
                if children.failure is not None:
                    return children.failure
                if children.has_left:
                    return None if num_signals else ChildFailed(f"{children.plans[0].name} left", False, 1)
                if time.monotonic() > drained_by:
                    logger.error("the frontend did not come to an end; what was under way runs again elsewhere")
                    return None
        finally:
            children.stop(STOP_TIMEOUT_S if children.has_left and self._signals.count < 2 else 0.0)
