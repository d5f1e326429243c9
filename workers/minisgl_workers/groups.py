"""Several worker groups on one host, each a process with a supervisor of its own: data parallelism.

They share nothing but the queue. A group whose supervisor dies is started again; one that gives up leaves the work to
the others. Called by the command line.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from minisgl_batch.child_process import LOG_PREFIX_ENV, ChildFailed, ChildProcess, ChildReady
from minisgl_batch.errors import UsageError, WorkerError
from minisgl_workers.children import STABLE_AFTER_S, backoff_s
from minisgl_workers.group_process import BETWEEN_SIGNALS_S, MODULE, STOP_S
from minisgl_workers.options import WorkerOptions
from minisgl_workers.signals import StopSignals

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
CPU_MEMORY_RATIO = 0.4  # of one group that has the host to itself, as in `minisgl_batch.engine.memory`


@dataclass
class _Group:
    """One group; `process` is None while it waits to be started again, and once it has given up."""

    number: int
    options: WorkerOptions
    env: dict[str, str]
    process: ChildProcess | None = None
    started: float = 0.0
    start_at: float = 0.0
    was_ready: bool = False
    gave_up: bool = False
    num_failures: int = 0

    def start(self) -> ChildProcess:
        self.started = time.monotonic()
        self.process = ChildProcess(f"group {self.number}", MODULE, self.options, self.env)
        return self.process


class Groups:
    """Runs groups until it is told to stop. For the main thread.

    Args:
        options: of each group.
        num_groups: how many.
        on_ready: called with a group's number, from 0, and what its processes said, whenever it serves.
    """

    def __init__(
        self, options: WorkerOptions, num_groups: int, on_ready: Callable[[int, dict[str, dict[str, Any]]], None]
    ) -> None:
        self._on_ready = on_ready
        options = options.fetched()
        gpus = [] if options.engine.device == "cpu" else visible_gpus()
        self._groups = [
            _Group(number, *share_of_host(options, number, num_groups, gpus)) for number in range(num_groups)
        ]
        self._signals = StopSignals()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until a signal; like for a single group, the first drains and a second stops at once.

        Raises:
            WorkerError: a group couldn't start, or all have given up.
        """
        with self._signals, self._selector:
            self._selector.register(self._signals.fd, selectors.EVENT_READ)
            try:
                self._serve()
            finally:
                self._end()

    def _serve(self) -> None:
        num_signals = 0
        while any(group.process is not None or not (num_signals or group.gave_up) for group in self._groups):
            self._start_due(is_stopping=num_signals > 0)
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    self._signals.clear()
                else:
                    self._take_status(key.data)
            while num_signals < self._signals.count:
                num_signals += 1
                self._signal_all()

    def _start_due(self, *, is_stopping: bool) -> None:
        for group in self._groups:
            is_due = group.process is None and not group.gave_up and time.monotonic() >= group.start_at
            if is_due and not is_stopping:
                self._selector.register(group.start().status_fd, selectors.EVENT_READ, group)

    def _take_status(self, group: _Group) -> None:
        assert group.process is not None
        match group.process.read_status():
            case ChildReady(info):
                group.was_ready = True
                self._on_ready(group.number, info)
            case ChildFailed() as failure:
                if not group.was_ready:
                    raise failure.error()
                self._forget(group)
                group.gave_up = True
                logger.error("group %d gives up: %s", group.number, failure.message)
                if all(other.gave_up for other in self._groups):
                    raise WorkerError(f"all groups have given up; the last one: {failure.message}")
            case None:
                self._lost(group, group.process)
            case _:
                pass

    def _lost(self, group: _Group, process: ChildProcess) -> None:
        """A group has ended: as it was told to, or killed."""
        message = f"group {group.number} {process.describe_end()}"
        self._forget(group)
        if self._signals.count:
            return
        if not group.was_ready:
            raise WorkerError(message)
        is_stable = time.monotonic() - group.started > STABLE_AFTER_S
        group.num_failures = 1 if is_stable else group.num_failures + 1
        delay_s = backoff_s(group.num_failures)
        group.start_at = time.monotonic() + delay_s
        logger.error("%s; starting it again in %.0f s", message, delay_s)

    def _forget(self, group: _Group) -> None:
        assert group.process is not None
        self._selector.unregister(group.process.status_fd)
        group.process.stop(STOP_S)
        group.process = None

    def _signal_all(self) -> None:
        for group in self._groups:
            if group.process is not None:
                group.process.send_signal(signal.SIGTERM)

    def _end(self) -> None:
        """End what still runs, after an error of ours or of a group's: at once, which takes two signals."""
        for _ in range(2):
            self._signal_all()
            time.sleep(BETWEEN_SIGNALS_S if any(group.process for group in self._groups) else 0)
        for group in self._groups:
            if group.process is not None:
                group.process.stop(STOP_S)


def share_of_host(
    options: WorkerOptions, number: int, num_groups: int, gpus: list[str]
) -> tuple[WorkerOptions, dict[str, str]]:
    """A group's options and environment: its own of the GPUs, or its share of the host's processors and memory.

    Raises:
        UsageError: the host has too few GPUs.
    """
    env = {LOG_PREFIX_ENV: f"group {number} "}
    engine, tp = options.engine, options.engine.tp
    if gpus or engine.device == "cuda":
        needed = num_groups * tp
        if len(gpus) < needed:
            raise UsageError(f"{num_groups} groups of {tp} ranks need {needed} GPUs, and there are {len(gpus)}")
        env[_VISIBLE] = ",".join(gpus[number * tp : (number + 1) * tp])
        return msgspec.structs.replace(options, engine=replace(engine, device="cuda")), env
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (num_groups * tp)))
    ratio = (engine.memory_ratio or CPU_MEMORY_RATIO) / num_groups
    return msgspec.structs.replace(options, engine=replace(engine, device="cpu", memory_ratio=ratio)), env


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs here. Asks a process of its own: this one shall not hold any."""
    count = int(subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, check=True).stdout)
    named = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    return named[:count] if named else [str(number) for number in range(count)]
