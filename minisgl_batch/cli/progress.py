"""Follows a job on standard error: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from types import TracebackType

from minisgl_batch.cli.console import stderr_console, talk
from minisgl_batch.client import JobHandle, Progress
from minisgl_batch.client.show import ProgressBar, details
from minisgl_batch.errors import OutputError, WorkerError
from minisgl_jobs.model import JobState
from minisgl_jobs.status import JobStatus

POLL_S = 0.2
PLAIN_EVERY_S = 10.0


def follow(
    job: JobHandle, *, live: bool = True, patient: bool = True, check: Callable[[], None] = lambda: None
) -> JobStatus:
    """Show a job's progress until it ends, and answer its last status.

    Args:
        live: redraw one line, on a terminal.
        patient: wait on while the job's rows are done and its dataset can't be finished, such as on a full disk.
        check: called with every look at the job; raises when there is no use in waiting.

    Raises:
        OutputError: the dataset can't be finished, and that isn't waited for.
    """
    with ProgressLine(live=live) as line:
        for progress in job.watch(POLL_S):
            line.update(progress)
            if progress.state.is_final:
                return progress.status
            if progress.state is JobState.FINALISING and progress.trouble and not patient:
                raise OutputError(
                    f"{progress.trouble}: job {job.id} is left unfinished; with room again, the same command with "
                    f"--output {shlex.quote(progress.status.spec.output)} goes on with the rows that are on disk"
                )
            check()
    raise WorkerError(f"job {job.id} can't be followed any more")


class ProgressLine:
    """How far a job is, on one line. Use as a context manager."""

    def __init__(self, *, live: bool = True) -> None:
        self._said = ("", "")  # state and trouble that a plain line told last
        self._said_at = 0.0
        self._bar: ProgressBar | None = None
        if live and sys.stderr.isatty():
            self._bar = ProgressBar(stderr_console())

    def update(self, progress: Progress) -> None:
        """Show this now, or the next time a line is due."""
        if self._bar is not None:
            self._bar.update(progress)
            return
        now, saying = time.monotonic(), (progress.state.value, progress.trouble)
        if progress.state.is_final:
            return  # a report follows
        if saying != self._said or now - self._said_at >= PLAIN_EVERY_S:
            self._said, self._said_at = saying, now
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
