"""The worker group that `minisgl-batch run` has for itself: a child process that ends with us, however we end."""

from __future__ import annotations

import select
import signal
import time
from types import TracebackType
from typing import IO, Any

from minisgl_batch.child_process import (
    ChildBeat,
    ChildDelivered,
    ChildFailed,
    ChildProcess,
    ChildReady,
    ChildSuspects,
)
from minisgl_batch.errors import WorkerError
from minisgl_workers.options import WorkerOptions

WORKER_GROUP = "minisgl_workers.group_process"
STOP_S = 10.0
BETWEEN_SIGNALS_S = 0.1  # two at once would count as one


class LocalWorker:
    """A worker group in a child process. Use as a context manager; leaving stops it."""

    def __init__(self, options: WorkerOptions, log: IO[bytes] | None) -> None:
        """Start it; its log goes to `log`, by default to standard error."""
        self._process = ChildProcess("worker", WORKER_GROUP, options, log=log)

    def wait_ready(self) -> dict[str, Any]:
        """Wait until it serves; answers the ready information of its processes.

        Raises:
            WorkerError: it couldn't start; has the first error and its exit code.
            InvalidParameterError: an option has a value that it can't use.
        """
        while (info := self._read()) is None:
            select.select([self._process.status_fd], [], [])
        return info

    def check(self) -> None:
        """Raise WorkerError if it has ended. One that has started again after a crash is fine."""
        while self._read() is not None:
            pass

    def _read(self) -> dict[str, Any] | None:
        """What it said when it became ready; None while it says nothing."""
        if not select.select([self._process.status_fd], [], [], 0)[0]:
            return None
        match self._process.read_status():
            case ChildReady(info):
                return info
            case ChildFailed() as failure:
                raise failure.error()
            case ChildBeat() | ChildSuspects() | ChildDelivered():
                return None
            case None:
                raise WorkerError(f"the worker {self._process.describe_end()}")

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None:  # nothing of it is wanted any more: a second signal makes it stop at once
            self._process.send_signal(signal.SIGTERM)
            time.sleep(BETWEEN_SIGNALS_S)
        self._process.stop(STOP_S)
