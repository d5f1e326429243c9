"""Follows a job on standard error: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from minisgl_batch.cli.console import stderr_console, talk
from minisgl_batch.client import JobHandle, Progress
from minisgl_batch.client.show import ProgressBar, details
from minisgl_batch.errors import WorkerError
from minisgl_jobs.status import JobStatus

POLL_S = 0.2
PLAIN_EVERY_S = 10.0


def follow(job: JobHandle, *, live: bool = True, check: Callable[[], None] = lambda: None) -> JobStatus:
    """Show a job's progress until it ends, and answer its last status.

    Args:
        live: redraw one line, on a terminal.
        check: called with every look at the job; raises when there is no use in waiting.
    """
    with ProgressLine(live=live) as line:
        for progress in job.watch(POLL_S):
            line.update(progress)
            if progress.state.is_final:
                return progress.status
            check()
    raise WorkerError(f"job {job.id} can't be followed any more")


class ProgressLine:
    """How far a job is, on one line. Use as a context manager."""

    def __init__(self, *, live: bool = True) -> None:
        self._said = ("", 0.0)  # state that a plain line told last, and when
        self._bar: ProgressBar | None = None
        if live and sys.stderr.isatty():
            self._bar = ProgressBar(stderr_console())

    def update(self, progress: Progress) -> None:
        """Show this now, or the next time a line is due."""
        if self._bar is not None:
            self._bar.update(progress)
            return
        state, said_at = self._said
        now = time.monotonic()
        if progress.state.is_final:
            return  # a report follows
        if progress.state.value != state or now - said_at >= PLAIN_EVERY_S:
            self._said = (progress.state.value, now)
            talk(f"{progress.state.value}: {', '.join([_rows(progress), *details(progress)])}")

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(exc_type, exc, traceback)


def _rows(progress: Progress) -> str:
    return f"{progress.rows_done:,} of {progress.num_rows:,} rows"
