"""Jobs and workers as rows of tables: for terminals, notebooks and plain text. Knows nothing of Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from minisgl_batch.client.progress import Progress
from minisgl_batch.words import duration, one_line
from minisgl_jobs.status import WorkerInfo

JOB_COLUMNS = ("JOB", "STATE", "MODEL", "ROWS", "FAILED", "TOK/S", "LEFT", "SUBMITTED")
WORKER_COLUMNS = ("WORKER", "MODEL", "RUNNING", "WAITING", "TOK/S", "CACHED", "UP", "ON")


@dataclass(frozen=True)
class Overview:
    """Jobs and workers at one moment. Notebooks show it as tables.

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

    def _repr_html_(self) -> str:
        jobs = html_table(JOB_COLUMNS, map(job_row, self.jobs))
        workers = html_table(WORKER_COLUMNS, map(worker_row, self.workers))
        return f"{jobs}{workers}<p>{escape(self.summary)}</p>"


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
