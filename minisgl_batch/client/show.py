"""Jobs and workers as rows of tables: for terminals, notebooks and plain text. Knows nothing of Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING

from minisgl_batch.client.progress import Progress
from minisgl_batch.words import duration, one_line, text_table
from minisgl_jobs.status import WorkerInfo

if TYPE_CHECKING:
    from rich.console import Console

JOB_COLUMNS = ("JOB", "STATE", "MODEL", "ROWS", "FAILED", "TOK/S", "LEFT", "SUBMITTED")
WORKER_COLUMNS = ("WORKER", "MODEL", "RUNNING", "WAITING", "TOK/S", "CACHED", "UP", "ON")


@dataclass(frozen=True)
class Overview:
    """Jobs and workers at one moment. Printed or shown in a notebook, it is two tables.

    Attributes:
        jobs: newest first.
        workers: the living groups.
    """

    jobs: list[Progress]
    workers: list[WorkerInfo]

    @property
    def summary(self) -> str:
        """Such as `2 jobs under way, 1 worker, 1,234 tokens/s`."""
        num_jobs = sum(not job.state.is_final for job in self.jobs)
        rate = sum(worker.tokens_per_s for worker in self.workers)
        jobs = f"{num_jobs:,} job{'' if num_jobs == 1 else 's'} under way"
        workers = f"{len(self.workers):,} worker{'' if len(self.workers) == 1 else 's'}"
        return f"{jobs}, {workers}, {rate:,.0f} tokens/s"

    def __str__(self) -> str:
        tables = ((JOB_COLUMNS, [*map(job_row, self.jobs)]), (WORKER_COLUMNS, [*map(worker_row, self.workers)]))
        shown = ["\n".join(text_table(columns, rows)) for columns, rows in tables if rows]
        return "\n\n".join([*shown, self.summary])

    def _repr_html_(self) -> str:
        jobs = html_table(JOB_COLUMNS, map(job_row, self.jobs))
        workers = html_table(WORKER_COLUMNS, map(worker_row, self.workers))
        return f"{jobs}{workers}<p>{escape(self.summary)}</p>"


class ProgressBar:
    """How far a job is, as a bar in a notebook or on a terminal. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        """`console` by default is standard output's."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn())
        self._bar = Bar(*columns, TextColumn("{task.fields[rest]}"), console=console, transient=console is not None)
        self._task = self._bar.add_task("queued", total=None, rest="")

    def update(self, progress: Progress) -> None:
        """Show this now."""
        self._bar.update(
            self._task,
            description=progress.state.value,
            completed=progress.rows_done,
            total=progress.num_rows,
            rest=" · ".join(details(progress)),
        )

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()


def details(progress: Progress) -> list[str]:
    """What there is to say beside the number of rows, such as `2 failed`, `1,200 tok/s`, `20 s left`."""
    found = []
    if progress.status.waiting:
        found.append(f"waiting: {progress.status.waiting}")
    if progress.trouble:
        found.append(f"waiting: {one_line(progress.trouble)}")
    if progress.status.rows_error:
        found.append(f"{progress.status.rows_error:,} failed")
    if progress.tokens_per_s:
        found.append(f"{progress.tokens_per_s:,.0f} tok/s")
    if progress.cached_share is not None:
        found.append(f"{progress.cached_share:.0%} of prompts cached")
    if progress.eta_s is not None:
        found.append(f"{duration(progress.eta_s)} left")
    return found


def job_row(progress: Progress) -> tuple[str, ...]:
    """The cells of JOB_COLUMNS."""
    job = progress.status
    return (
        job.job_id,
        f"{job.state.value} (waiting)" if job.waiting else job.state.value,
        one_line(job.spec.model),
        f"{progress.rows_done:,}/{job.spec.num_rows:,}",
        f"{job.rows_error:,}",
        f"{progress.tokens_per_s:,.0f}" if job.leases else "-",
        duration(progress.eta_s) if progress.eta_s is not None else "-",
        f"{duration(job.now - job.created_at)} ago",
    )


def worker_row(worker: WorkerInfo) -> tuple[str, ...]:
    """The cells of WORKER_COLUMNS."""
    return (
        one_line(worker.worker_id),
        one_line(worker.model),
        f"{worker.num_running:,}",
        f"{worker.num_waiting:,}",
        f"{worker.tokens_per_s:,.0f}",
        f"{worker.cached_tokens / worker.prompt_tokens:.0%}" if worker.prompt_tokens else "-",
        duration(time.time() - worker.since),
        " ".join(one_line(str(worker.description[name])) for name in ("device", "dtype") if name in worker.description),
    )


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for notebooks; what users and models wrote is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
