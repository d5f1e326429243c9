"""The processes of one worker group while they live: started, watched, and ended together.

A spare process that dies is started again by itself. The death of any other, or one that hangs, is the group's failure:
ranks hold each other's state, and the frontend's requests are in the ranks. Called by the supervisor.
"""

from __future__ import annotations

import logging
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_batch.child_process import (
    ChildBeat,
    ChildDelivered,
    ChildFailed,
    ChildPlan,
    ChildProcess,
    ChildReady,
    ChildSuspects,
)

logger = logging.getLogger(__name__)

LOOK_S = 1.0
ECHO_S = 0.3  # how long after a death others may still say what they died of
PAUSE_S = 3.0  # a look that comes so late shows that this process was stopped: time in which it saw no beats
MAX_BACKOFF_S = 30.0
SILENT_S = 30.0  # far more than a beating process can be kept from beating by its own work or by a busy machine
MIN_SILENT_S = 3.0  # a few beats
FIRST_BACKOFF_S = 1.0
SPARE_STOP_S = 2.0
STABLE_AFTER_S = 60.0  # what lived so long begins its backoff anew


def backoff_s(num_failures: int, first_s: float = FIRST_BACKOFF_S) -> float:
    """How long to wait before the next start: `first_s` at first, and twice as long each time."""
    return float(min(MAX_BACKOFF_S, first_s * 2 ** (num_failures - 1)))


@dataclass
class _Child:
    """One process, and what is known of it. `process` is None while a spare one waits to be started again."""

    plan: ChildPlan
    process: ChildProcess | None
    started: float
    ready: dict[str, Any] | None = None
    progress: int | None = None
    got_on: float | None = None  # when it was last seen to get on, or to be idle; None before its first beat
    heard: float = 0.0  # its last beat
    num_failures: int = 0
    start_at: float = 0.0


@dataclass
class Children:
    """See the module's docstring.

    Attributes:
        plans: what to start; the first is the frontend.
        first_backoff_s: how long a spare child waits for its next start after its first death.
        hang_s: a child that beats and doesn't get on for so long hangs. One that stops beating is found sooner.
        failure: why the group has failed; None while it lives.
        has_left: the frontend ended in order.
        has_delivered: something came of its work.
        suspects: a child works on what has killed its like before.
    """

    plans: Sequence[ChildPlan]
    hang_s: float
    first_backoff_s: float
    failure: ChildFailed | None = None
    has_left: bool = False
    has_delivered: bool = False
    suspects: bool = False
    _children: list[_Child] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _wake_fd: int = -1
    _is_draining: bool = False
    _looked: float = field(default_factory=time.monotonic)

    def start(self, wake_fd: int) -> None:
        """Start all. `wait` also returns when `wake_fd` is readable."""
        self._wake_fd = wake_fd
        self._selector.register(wake_fd, selectors.EVENT_READ)
        for plan in self.plans:
            self._children.append(_Child(plan, None, 0.0))
            self._start(self._children[-1])

    @property
    def is_ready(self) -> bool:
        """Whether all have been ready once."""
        return all(child.ready is not None for child in self._children)

    @property
    def ready_info(self) -> dict[str, dict[str, Any]]:
        """What each said when it became ready, by name."""
        return {child.plan.name: child.ready or {} for child in self._children}

    def wait(self) -> None:
        """Take what happens within the next second at most; see the attributes for what it came to."""
        failures = self._take_statuses(LOOK_S)
        self._start_spares()
        self._find_hanging(failures)
        if failures:
            self._selector.unregister(self._wake_fd)
            until = time.monotonic() + ECHO_S
            while (left := until - time.monotonic()) > 0:
                failures += self._take_statuses(left)
            self._fail(failures)

    def drain(self) -> None:
        """Ask the frontend to come to an end. From now on it ends the others, which may be gone before it is."""
        self._is_draining = True
        process = self._children[0].process
        if process is not None:
            process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float) -> None:
        """End all: those that don't end within `timeout_s` of a SIGTERM are killed; without a time, all.

        If the group was never ready, spare ones have a moment to end in order: RQ remembers a killed worker.
        """
        if not self.is_ready:
            for child in self._children:
                if child.plan.is_spare and child.process is not None:
                    child.process.stop(SPARE_STOP_S)
                    child.process = None
        running = [child.process for child in self._children if child.process is not None]
        if timeout_s > 0:
            for process in running:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for process in running:
            process.stop(max(0.0, deadline - time.monotonic()))
        self._selector.close()

    # ------------------------------------------------------------- internals

    def _take_statuses(self, timeout_s: float) -> list[ChildFailed]:
        failures: list[ChildFailed] = []
        for key, _ in self._selector.select(timeout_s):
            child = key.data
            if child is None:
                continue  # the caller's
            process, is_first = child.process, True
            while child.process is process and (is_first or process.has_more):
                is_first = False
                failures += self._take_status(child, process)
        return failures

    def _take_status(self, child: _Child, process: ChildProcess) -> list[ChildFailed]:
        match process.read_status():
            case ChildReady(info):
                child.ready = info
            case ChildBeat(progress):
                child.heard = time.monotonic()
                if progress is None or progress != child.progress or child.got_on is None:
                    child.progress, child.got_on = progress, time.monotonic()
            case ChildSuspects(suspects):
                self.suspects = suspects
            case ChildDelivered():
                self.has_delivered = True
            case ChildFailed() as failure:
                return self._lost(child, process, failure)
            case None if child is self._children[0] and process.ended_in_order:
                self._selector.unregister(process.status_fd)
                self.has_left = True
            case None if self._is_draining and process.ended_in_order:
                self._selector.unregister(process.status_fd)
                child.got_on = None  # it needn't get on any more
            case None:
                failure = ChildFailed(f"{child.plan.name} {process.describe_end()}", False, 1, time.monotonic())
                return self._lost(child, process, failure)
        return []

    def _lost(self, child: _Child, process: ChildProcess, failure: ChildFailed) -> list[ChildFailed]:
        """A child is dying: a spare one that has served is started again later, else this is the group's failure."""
        self._selector.unregister(process.status_fd)  # what it says after that is of no interest
        if not child.plan.is_spare or child.ready is None:
            return [failure]
        process.stop(0.0)
        now = time.monotonic()
        child.process = None
        child.num_failures = 1 if now - child.started > STABLE_AFTER_S else child.num_failures + 1
        delay_s = backoff_s(child.num_failures, self.first_backoff_s)
        child.start_at = now + delay_s
        logger.error("%s; starting it again in %g s", failure.message, delay_s)
        return []

    def _start_spares(self) -> None:
        for child in self._children:
            if child.process is None and time.monotonic() >= child.start_at:
                self._start(child)

    def _start(self, child: _Child) -> None:
        child.process = child.plan.start()
        child.started = time.monotonic()
        self._selector.register(child.process.status_fd, selectors.EVENT_READ, child)

    def _find_hanging(self, failures: list[ChildFailed]) -> None:
        now = time.monotonic()
        pause_s, self._looked = now - self._looked, now
        # One that is stopped is found, and named, before those that wait for it.
        silent_s = min(SILENT_S, max(MIN_SILENT_S, self.hang_s / 2))
        for child in self._children:
            if child.got_on is None:
                continue
            if pause_s > PAUSE_S:
                child.got_on = min(now, child.got_on + pause_s)
                child.heard = min(now, child.heard + pause_s)
            if now - child.heard > silent_s:
                failures.append(ChildFailed(f"{child.plan.name} hangs: silent for {silent_s:.0f} s", False, 1, now))
            elif now - child.got_on > self.hang_s:
                failures.append(ChildFailed(f"{child.plan.name} hangs: nothing for {self.hang_s:.0f} s", False, 1, now))

    def _fail(self, failures: list[ChildFailed]) -> None:
        """The first failure is the cause, the others follow from it; so does a rank's that lost another one."""
        first, *others = sorted(failures, key=lambda failure: (failure.is_echo, failure.at_s))
        for other in others:
            logger.error("after that: %s", other.message)
        self.failure = first
