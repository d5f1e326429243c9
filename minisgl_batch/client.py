"""Submits jobs and follows them: what a program needs that isn't a worker. Imports no torch.

    with Client("redis://localhost:6379") as client:
        job = client.submit(["What is 17 + 25?"], model="demo", output="answers", max_tokens=16)
        job.wait()
        for row in job.rows(): print(row.text)

Called by programs, notebooks and the command line; for several threads, not for several processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa
import redis

from minisgl_batch.errors import (
    InvalidParameterError,
    JobNotFoundError,
    JobStateError,
    JobTimeoutError,
    QueueError,
    RedisUnavailableError,
    UsageError,
)
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.connection import connect
from minisgl_jobs.dataset import claim_output, clear_dataset, output_owner, release_output, reopen_dataset
from minisgl_jobs.job_results import JobResults
from minisgl_jobs.model import MAX_CHUNK_ROWS, JobState, Priority, RowResult
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import OUTAGE_S, Event, TokenReader
from minisgl_jobs.results import result_schema, table_to_results
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.status import JobStatus, WorkerInfo
from minisgl_jobs.submission import Source, Submission, prepare
from minisgl_jobs.unserved import end_unserved

logger = logging.getLogger(__name__)

URL_VARIABLE = "MINISGL_REDIS"
POLL_S = 0.1
HELP_S = 1.0  # between looks whether a job that only has to be ended is left alone
_CHUNKS_PER_APPEND = 16


@dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes:
        status: what the queue knows.
        rows_done: rows that are finished, those of unfinished chunks (about, with several samples a row) included.
        tokens_per_s: that the job's workers generate, for all of their jobs.
        cached_share: of the prompt tokens of these workers since they started; None when nothing ran yet.
        eta_s: until the last row, from the rows so far; None when nothing can be said.
    """

    status: JobStatus
    rows_done: int
    tokens_per_s: float
    cached_share: float | None
    eta_s: float | None

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def num_rows(self) -> int:
        return self.status.spec.num_rows


class Client:
    """A connection to the jobs and workers of one Redis. Close it, or use it as a context manager."""

    def __init__(self, redis_url: str | None = None) -> None:
        """
        Args:
            redis_url: see `minisgl_jobs.connection.connect`; by default what MINISGL_REDIS holds.

        Raises:
            UsageError: the URL isn't one of Redis, or there is none.
            RedisUnavailableError: the server can't be reached.
        """
        url = redis_url or os.environ.get(URL_VARIABLE)
        if not url:
            raise UsageError(f"no Redis URL: give one such as redis://localhost:6379, or set {URL_VARIABLE}")
        self._redis = connect(url)
        self._queue = JobQueue(self._redis)

    def submit(
        self,
        source: Source,
        *,
        model: str,
        output: str | os.PathLike[str] | None = None,
        params: SamplingParams | None = None,
        system: str | None = None,
        template: str | None = None,
        chat: bool | None = None,
        limit: int | None = None,
        on_error: Literal["fail", "record"] = "fail",
        priority: Priority | str = Priority.NORMAL,
        chunk_rows: int = MAX_CHUNK_ROWS,
        seed: int | None = None,
        token_ids: bool = False,
        overwrite: bool = False,
        job_id: str | None = None,
        **fields: Any,
    ) -> JobHandle:
        """Read an input, check all of it, and queue it as one job. Nothing is queued when anything is wrong.

        Args:
            source: a JSONL file's path (gzip and zstd too), "-" for stdin, or rows as dicts or prompts.
            model: the name that workers serve it as.
            output: a folder that the workers see; by default `outputs/<job id>` here.
            params: sampling of rows that don't say otherwise.
            system, template, chat, limit, on_error: see `ReadOptions`.
            priority: "high", "normal" or "low".
            chunk_rows: rows per unit of delivery, which is one Parquet part.
            seed: makes the samples of rows without a seed of their own repeatable.
            token_ids: write the `output_token_ids` column.
            overwrite: remove a dataset that is in the output folder.
            job_id: a name for the job, by default one with the input's name and the date. Submitting the same job (also
                the same `seed`) under the same name again changes nothing.
            **fields: sampling fields one by one, such as `max_tokens=16`, over `params`.

        Raises:
            InvalidInputError: the input can't be read or has faults, which it lists, or holds no rows.
            OutputError: the output folder holds a dataset, or can't be written.
            UsageError: an argument has a value that can't be used; names it.
            JobStateError: another job has this id, or writes to the folder that is to be overwritten.
            RedisUnavailableError: Redis stayed away. RedisFullError: Redis has no room for the job.
        """
        read = ReadOptions(system=system, template=template, chat=chat, limit=limit, on_error=on_error)
        with prepare(
            source,
            model=model,
            output=output,
            params=_sampling(params, fields),
            read=read,
            priority=priority,
            chunk_rows=chunk_rows,
            seed=seed,
            token_ids=token_ids,
            overwrite=overwrite,
            job_id=job_id,
        ) as submission:
            job = self.submit_prepared(submission)
        self.warn_if_unserved(model)
        return job

    def submit_prepared(self, submission: Submission) -> JobHandle:
        """Queue what `minisgl_jobs.submission.prepare` has checked. Errors as those of `submit` about Redis."""
        spec, folder = submission.spec, Path(submission.spec.output)
        if submission.overwrite:
            self._refuse_running_output(folder, spec.job_id)
        if self._queue.create(spec):
            try:
                payloads = submission.payloads()
                while batch := dict(islice(payloads, _CHUNKS_PER_APPEND)):
                    self._queue.append(spec, batch)
                if submission.overwrite:
                    clear_dataset(folder)
                claim_output(folder, spec.job_id)
                self._queue.seal(spec)
            except BaseException:
                with suppress(QueueError):  # what can't be dropped now expires
                    self._queue.drop(spec)
                release_output(folder, spec.job_id)
                raise
        return JobHandle(self._redis, self._queue, spec.job_id)

    def _refuse_running_output(self, folder: Path, job_id: str) -> None:
        """Raise JobStateError if another job is about to write to a folder that is to be overwritten."""
        owner = output_owner(folder)
        if owner in ("", job_id):
            return
        with suppress(JobNotFoundError):  # lost, or of another Redis: nobody writes there
            state = self._queue.status(owner).state
            if not state.is_final:
                raise JobStateError(f"{folder} is the output of job {owner}, which is {state.value}: cancel it first")

    def warn_if_unserved(self, model: str) -> None:
        """Log a warning when no living worker serves a model."""
        served = sorted({worker.model for worker in self.workers()})
        if model not in served:
            others = f"; workers serve {', '.join(served)}" if served else ""
            logger.warning("no worker serves %s now: its jobs wait until one does%s", model, others)

    def job(self, job_id: str) -> JobHandle:
        """A job that was submitted before.

        Raises:
            JobNotFoundError: there is no such job (any more).
        """
        self._queue.find(job_id)
        return JobHandle(self._redis, self._queue, job_id)

    def jobs(self, *, model: str | None = None, limit: int = 100) -> list[JobStatus]:
        """The newest jobs, of one model or of all, newest first."""
        return self._queue.jobs(model=model, limit=limit)

    def workers(self, *, model: str | None = None) -> list[WorkerInfo]:
        """The living worker groups, of one model or of all."""
        return self._queue.workers(model=model)

    def close(self) -> None:
        """Close the connection; handles of jobs end with it."""
        self._redis.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class JobHandle:
    """One job of a Client.

    Its states: submitting, queued, running, canceling, finalising, and at last one of finished (every row succeeded),
    partial (complete, with error rows), failed and canceled. A retry takes a partial job back to queued.

    Methods raise JobNotFoundError when the job is gone (finished jobs expire), and RedisUnavailableError.
    """

    def __init__(self, client: redis.Redis, queue: JobQueue, job_id: str) -> None:
        self.id = job_id
        self._redis = client
        self._queue = queue
        self._results = JobResults(queue, job_id)

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    def status(self) -> JobStatus:
        """All that the queue knows about the job."""
        return self._queue.status(self.id)

    def progress(self) -> Progress:
        """How far the job is."""
        status = self.status()
        spec = status.spec
        busy = {lease.worker_id for lease in status.leases}
        workers = [worker for worker in self._queue.workers(model=spec.model) if worker.worker_id in busy]
        prompt_tokens = sum(worker.prompt_tokens for worker in workers)
        rows_done = min(spec.num_rows, status.rows_done + status.num_spooled // (spec.params.n or 1))
        return Progress(
            status=status,
            rows_done=rows_done,
            tokens_per_s=sum(worker.tokens_per_s for worker in workers),
            cached_share=sum(worker.cached_tokens for worker in workers) / prompt_tokens if prompt_tokens else None,
            eta_s=_eta(status, rows_done),
        )

    def watch(self, poll_s: float = POLL_S) -> Iterator[Progress]:
        """The job's progress every `poll_s`, until it has ended. Puts up with a Redis that is away for two minutes.

        A job that only has to be ended, and whose model no worker serves any more, is ended by this.
        """
        away_since: float | None = None
        help_at = 0.0
        while True:
            try:
                progress = self.progress()
                if time.monotonic() >= help_at:
                    end_unserved(self._redis, progress.status)
                    help_at = time.monotonic() + HELP_S
                away_since = None
            except RedisUnavailableError:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > OUTAGE_S:
                    raise
            else:
                yield progress
                if progress.state.is_final:
                    return
            time.sleep(poll_s)

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job has ended, and answer its last status.

        Raises:
            JobTimeoutError: it hasn't ended within `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for progress in self.watch():
            if progress.state.is_final:
                return progress.status
            if deadline is not None and time.monotonic() >= deadline:
                raise JobTimeoutError(f"job {self.id} is still {progress.state.value} after {timeout_s:g} s")
        raise AssertionError("watch ends with a final status")

    def cancel(self) -> None:
        """Stop the job: its readers see it at once, rows that run stop, finished ones stay. May be repeated.

        Raises:
            JobStateError: it has ended otherwise, or all of its rows are done.
        """
        self._queue.cancel(self.id)
        end_unserved(self._redis, self.status())

    def retry(self) -> None:
        """Generate the error rows of a partial job again, into the same dataset; the other rows stay as they are.

        Until the job has ended again the dataset has no `_SUCCESS`; its manifest and parts can be read all the time.

        Raises:
            JobStateError: the job isn't partial.
            OutputError: the output folder can't be written, or holds another job's dataset by now.
        """
        status = self.status()
        if status.state is not JobState.PARTIAL:
            raise JobStateError(f"job {self.id} can't be retried: it is {status.state.value}, not partial")
        folder = Path(status.spec.output)
        if folder.is_dir():
            reopen_dataset(folder, self.id)
        self._queue.retry(self.id)

    def stream(self, rows: Collection[int] | None = None) -> Iterator[Event]:
        """Every token once, whenever the caller comes: RowStarted, RowText and RowFinished as they happen.

        The texts of a sample since its last RowStarted, put together, are its text. Ends with the job.

        Args:
            rows: indices of the rows to read; by default all.

        Raises:
            UsageError: the job has no such row.
            OutputError: finished rows are in a folder that isn't here.
        """
        num_rows = self.status().spec.num_rows
        for row in rows or ():
            if not 0 <= row < num_rows:
                raise UsageError(f"job {self.id} has no row {row}: its rows are 0 to {num_rows - 1}")
        return iter(TokenReader(self._redis, self.id, self._results.fetch, rows=rows))

    def results(self, *, partial: bool = False) -> pa.Table:
        """The results as an Arrow table. Arguments and errors as `batches`."""
        batches = list(self.batches(partial=partial))
        schema = batches[0].schema if batches else result_schema(token_ids=self.status().spec.token_ids)
        return pa.Table.from_batches(batches, schema)

    def rows(self, *, partial: bool = False) -> Iterator[RowResult]:
        """The results one by one, in row order. Arguments and errors as `batches`."""
        for batch in self.batches(partial=partial):
            yield from table_to_results(pa.Table.from_batches([batch]))

    def batches(self, *, partial: bool = False) -> Iterator[pa.RecordBatch]:
        """The results in row order, a part of the dataset at a time: for more than fits into memory.

        Args:
            partial: those that are finished so far, while the job runs.

        Raises:
            JobStateError: the job hasn't ended, and `partial` wasn't asked for.
            OutputError: the output folder isn't on this machine, or is damaged.
        """
        return self._results.batches(partial=partial)


def _eta(status: JobStatus, rows_done: int) -> float | None:
    if status.state is not JobState.RUNNING or status.started_at is None or not rows_done or status.epoch:
        return None  # rows that an earlier epoch finished say nothing about the rate
    return (status.now - status.started_at) / rows_done * (status.spec.num_rows - rows_done)


def _sampling(params: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    unknown = fields.keys() - set(SamplingParams.__struct_fields__)
    if unknown:
        raise InvalidParameterError(sorted(unknown)[0], "is neither an argument of submit nor a sampling field")
    return SamplingParams(**fields).over(params or SamplingParams())
