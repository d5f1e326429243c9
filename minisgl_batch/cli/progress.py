"""Follows a job on standard error: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from minisgl_batch.cli.console import stderr_console, talk
from minisgl_batch.client import JobHandle, Progress
from minisgl_batch.errors import WorkerError
from minisgl_batch.words import duration
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
        self._bar: Bar | None = None
        if live and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rest]}"),
            )
            self._bar = Bar(*columns, console=stderr_console(), transient=True)
            self._task = self._bar.add_task("queued", total=None, rest="")

    def update(self, progress: Progress) -> None:
        """Show this now, or the next time a line is due."""
        if self._bar is not None:
            self._bar.update(
                self._task,
                description=progress.state.value,
                completed=progress.rows_done,
                total=progress.num_rows,
                rest=" · ".join(_details(progress)),
            )
            return
        state, said_at = self._said
        now = time.monotonic()
        if progress.state.is_final:
            return  # a report follows
        if progress.state.value != state or now - said_at >= PLAIN_EVERY_S:
            self._said = (progress.state.value, now)
            talk(f"{progress.state.value}: {', '.join([_rows(progress), *_details(progress)])}")

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _rows(progress: Progress) -> str:
    return f"{progress.rows_done:,} of {progress.num_rows:,} rows"


def _details(progress: Progress) -> list[str]:
    details = []
    if progress.status.waiting:
        details.append(f"waiting: {progress.status.waiting}")
    if progress.status.rows_error:
        details.append(f"{progress.status.rows_error:,} failed")
    if progress.tokens_per_s:
        details.append(f"{progress.tokens_per_s:,.0f} tok/s")
    if progress.cached_share is not None:
        details.append(f"{progress.cached_share:.0%} of prompts cached")
    if progress.eta_s is not None:
        details.append(f"{duration(progress.eta_s)} left")
    return details
