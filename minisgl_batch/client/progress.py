"""How far a job is, in numbers. Knows nothing of how they are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minisgl_jobs.model import JobState
from minisgl_jobs.status import JobStatus, WorkerInfo


@dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes:
        status: what the queue knows.
        rows_done: rows that are finished, with all of their samples, those of unfinished chunks included.
        tokens_per_s: that the job's workers generate, for all of their jobs.
        cached_share: of the prompt tokens of these workers since they started; None when nothing ran yet.
        trouble: what keeps it from getting on although workers have rows of it, such as a full disk; "" for nothing.
        eta_s: until the last row, from the rows so far; None when nothing can be said, as while it waits.
    """

    status: JobStatus
    rows_done: int
    tokens_per_s: float
    cached_share: float | None
    eta_s: float | None
    trouble: str = ""

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def num_rows(self) -> int:
        return self.status.spec.num_rows


def measure(status: JobStatus, workers: Iterable[WorkerInfo]) -> Progress:
    """The progress of a job that was just looked at, with the living workers of its model or of all."""
    spec = status.spec
    busy = {lease.worker_id for lease in status.leases}
    working = [worker for worker in workers if worker.worker_id in busy]
    troubles = [status.error if status.state is JobState.FINALISING else "", *(worker.trouble for worker in working)]
    trouble = next(filter(None, troubles), "")
    prompt_tokens = sum(worker.prompt_tokens for worker in working)
    # In a retry the old error rows are what is left to do.
    committed = status.rows_ok if status.epoch and not status.state.is_final else status.rows_done
    rows_done = min(spec.num_rows, committed + status.rows_spooled)
    return Progress(
        status=status,
        rows_done=rows_done,
        tokens_per_s=sum(worker.tokens_per_s for worker in working),
        cached_share=sum(worker.cached_tokens for worker in working) / prompt_tokens if prompt_tokens else None,
        eta_s=None if trouble or status.waiting else _eta(status, rows_done),
        trouble=trouble,
    )


def _eta(status: JobStatus, rows_done: int) -> float | None:
    if status.state is not JobState.RUNNING or status.started_at is None or not rows_done or status.epoch:
        return None  # rows that an earlier epoch finished say nothing about the rate
    return (status.now - status.started_at) / rows_done * (status.spec.num_rows - rows_done)
