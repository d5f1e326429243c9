"""A connection to one Redis: submits jobs, finds them again, and looks at workers.

Called by programs, notebooks and the command line; for several threads, not for several processes.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import datetime, timezone
from itertools import islice
from types import TracebackType
from typing import Any, Literal

import redis

from minisgl_batch.client.advice import (
    warn_if_tools_are_dropped,
    warn_if_unserved,
    warn_of_distant_workers,
    warn_of_other_engines,
)
from minisgl_batch.client.handle import JobHandle
from minisgl_batch.client.progress import measure
from minisgl_batch.client.show import Overview
from minisgl_batch.client.table_file import table_file
from minisgl_batch.errors import (
    InvalidParameterError,
    JobNotFoundError,
    JobStateError,
    OutputTakenError,
    QueueError,
)
from minisgl_batch.other_fields import UNSUPPORTED, no_such
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.connection import connect
from minisgl_jobs.dataset import check_dataset, clear_dataset, reopen_resumed
from minisgl_jobs.faults import MAX_SHOWN
from minisgl_jobs.folder_lock import lock_folder
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.keys import queue_name
from minisgl_jobs.model import MAX_CHUNK_ROWS, JobSpec, JobState, Priority
from minisgl_jobs.own_server import connect_own
from minisgl_jobs.owner import OWNER, claim_output, output_owner, release_output, take_output
from minisgl_jobs.parts import output_place
from minisgl_jobs.places import Place
from minisgl_jobs.queue import LOOK_S, JobQueue
from minisgl_jobs.resume import Resumption
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.status import JobStatus, WorkerInfo
from minisgl_jobs.submission import Source, Submission, Transport, prepare
from minisgl_jobs.tasks import forget_start, hold, task_queue

logger = logging.getLogger(__name__)

URL_VARIABLE = "MINISGL_REDIS"
_CHUNKS_PER_APPEND = 16


class Client:
    """A connection to the jobs and workers of one Redis. Close it, or use it as a context manager."""

    def __init__(self, redis_url: str | None = None) -> None:
        """
        Args:
            redis_url: see `minisgl_jobs.connection.connect`; by default what MINISGL_REDIS holds, else the server
                that this user's workers and commands share, which one of them must have started.

        Raises:
            UsageError: the URL isn't one of Redis.
            RedisUnavailableError: the server can't be reached.
        """
        url = redis_url or os.environ.get(URL_VARIABLE)
        self._redis = connect(url) if url else connect_own()
        self._queue = JobQueue(self._redis)

    def submit(
        self,
        /,
        source: Source,
        *,
        model: str,
        output: str | os.PathLike[str] | None = None,
        params: SamplingParams | None = None,
        system: str | None = None,
        template: str | None = None,
        prompt_column: str | None = None,
        messages_column: str | None = None,
        settings: bool = True,
        keep_columns: Sequence[str] = (),
        chat: bool | None = None,
        limit: int | None = None,
        on_error: Literal["fail", "record"] = "fail",
        max_faults: int = MAX_SHOWN,
        priority: Priority | str = Priority.NORMAL,
        chunk_rows: int = MAX_CHUNK_ROWS,
        seed: int | None = None,
        token_ids: bool = False,
        overwrite: bool = False,
        retry_failed: bool = False,
        job_id: str | None = None,
        transport: Transport = "auto",
        after: JobHandle | str | None = None,
        start_at: datetime | None = None,
        **fields: Any,
    ) -> JobHandle:
        """Read an input, check all of it, and queue it as one job. Nothing is queued when anything is wrong.

        Args:
            source: a path or URL of a JSONL, CSV, Parquet or Arrow file or of a folder of them, "-" for stdin, rows as
                dicts, prompts, chats (lists of messages) or lists of token ids, or a table (of pyarrow, pandas, polars:
                anything with an Arrow stream).
            model: the name that workers serve it as.
            output: a folder or URL that the workers see; by default `outputs/<job id>` here.
            params: sampling of rows that don't say otherwise.
            system, template, prompt_column, messages_column, settings, keep_columns, chat, limit, on_error,
                max_faults: see `ReadOptions`.
            priority: "high", "normal" or "low".
            chunk_rows: rows per unit of delivery, which is one Parquet part.
            seed: makes the samples of rows without a seed of their own repeatable.
            token_ids: write the `output_token_ids` column.
            overwrite: remove a dataset that is in the output folder.
            retry_failed: where the job goes on with a dataset, generate the rows that have failed there again, too.
            job_id: a name for the job, by default one with the input's name and the date. Submitting the same job (also
                the same `seed`) under the same name again changes nothing.
            transport: "value" sends the rows through Redis, "reference" lets workers read them where they are; by
                default rows of up to 64 MiB, compressed, are sent.
            after: start when this job, or the one of this id, has ended finished or partial. When it fails or is
                canceled, so is the new one.
            start_at: don't start before this time (without a zone: local time).
            **fields: sampling fields one by one, such as `max_tokens=16`, over `params`.

        Raises:
            InvalidInputError: the input can't be read or has faults, which it lists, or holds no rows.
            OutputError: the output folder holds a dataset, a `run` or, with `overwrite`, another job writes to it, or
                it can't be written.
            UsageError: an argument has a value that can't be used; names it.
            JobNotFoundError: there is no job `after` (any more).
            JobStateError: another job has this id, or the job `after` has failed or was canceled, or `retry_failed`
                is for a job that hasn't ended.
            RedisUnavailableError: Redis stayed away. RedisFullError: Redis has no room for the job.
        """
        if after is not None:
            self.check_predecessor(after.id if isinstance(after, JobHandle) else after)
        if isinstance(keep_columns, str) or not isinstance(keep_columns, Iterable):
            names = [name.strip() for name in keep_columns.split(",")] if isinstance(keep_columns, str) else None
            hint = f", got {keep_columns!r}" if names is None else f": write {names}"
            raise InvalidParameterError("keep_columns", f"must be a list of names{hint}")
        read = ReadOptions(
            system=system,
            template=template,
            prompt_column=prompt_column,
            messages_column=messages_column,
            settings=settings,
            keep_columns=tuple(keep_columns),
            chat=chat,
            limit=limit,
            on_error=on_error,
            max_faults=max_faults,
        )
        with ExitStack() as stack:
            if not isinstance(source, str | os.PathLike) and hasattr(source, "__arrow_c_stream__"):
                source, transport = stack.enter_context(table_file(source)), "value"
            submission = prepare(
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
                retry_failed=retry_failed,
                job_id=job_id,
                transport=transport,
            )
            job = self.submit_prepared(stack.enter_context(submission), after=after, start_at=start_at)
        workers = self.workers()
        warn_if_unserved(model, workers)
        warn_if_tools_are_dropped(submission, workers)
        return job

    def submit_prepared(
        self,
        submission: Submission,
        *,
        after: JobHandle | str | None = None,
        start_at: datetime | None = None,
        holds_output: bool = False,
    ) -> JobHandle:
        """Queue what `minisgl_jobs.submission.prepare` has checked. Errors as those of `submit` about Redis.

        Args:
            holds_output: whether the caller has locked the output folder; else this does, so that no `run` has it.
        """
        folder = output_place(submission.spec.output)
        with nullcontext() if holds_output else lock_folder(folder, alone=False):
            return self._submit(submission, folder, after, start_at)

    def _submit(
        self, submission: Submission, folder: Place, after: JobHandle | str | None, start_at: datetime | None
    ) -> JobHandle:
        spec = submission.spec
        first = after.id if isinstance(after, JobHandle) else after or ""
        start_s = _unix_seconds(start_at)
        if first:
            self.check_predecessor(first)
        if submission.overwrite:
            self.refuse_running_output(folder, spec.job_id)
        resumption = submission.resumption
        self._warn_of_workers(spec, resumption)
        if resumption is not None and not self._begin_resuming(spec, resumption):
            return JobHandle(self._redis, self._queue, spec.job_id)
        if self._queue.create(spec, epoch=resumption.epoch if resumption is not None else 0):
            try:
                if submission.overwrite:
                    self._take_output(folder, spec.job_id)
                if resumption is not None:
                    self._queue.adopt(spec, resumption.done)
                payloads = submission.payloads()
                while batch := dict(islice(payloads, _CHUNKS_PER_APPEND)):
                    self._queue.append(spec, batch)
                if submission.overwrite:
                    check_dataset(folder, spec.job_id)
                    clear_dataset(folder, keep=OWNER)
                claim_output(folder, spec.job_id, spec)
                if resumption is not None and len(resumption.done) < spec.num_chunks:
                    reopen_resumed(folder)
                self._queue.seal(spec, after=first, start_at=start_s)
            except BaseException:
                with suppress(QueueError):  # what can't be dropped now expires
                    self._queue.drop(spec)
                if resumption is None:
                    release_output(folder, spec.job_id)
                raise
            if first or start_s:
                self._hold(spec, first, start_s)
        return JobHandle(self._redis, self._queue, spec.job_id)

    def _warn_of_workers(self, spec: JobSpec, resumption: Resumption | None) -> None:
        """Where the living workers may not do what is meant. Asks for them only if that may be."""
        if spec.reference is not None:
            warn_of_distant_workers(spec.reference.uri, self.workers(model=spec.model))
        if resumption is not None and not resumption.is_complete:
            warn_of_other_engines(spec, resumption, self.workers(model=spec.model))

    def _begin_resuming(self, spec: JobSpec, resumption: Resumption) -> bool:
        """Make room for a job that goes on; False when it is under way, or has nothing left to do.

        Raises:
            JobStateError: it is under way, and rows that were to run again stay failed until its end.
        """
        try:
            status = self._queue.status(spec.job_id)
        except JobNotFoundError:  # expired, purged, or lost with its Redis
            return True
        state = status.state
        if state is JobState.SUBMITTING:
            self._queue.drop(spec)
            return True
        if not state.is_final and resumption.num_retried and status.rows_error:
            raise JobStateError(
                f"job {spec.job_id} is {state.value}: its failed rows can run again when it has ended "
                f"(minisgl-batch status {spec.job_id})"
            )
        if not state.is_final or (state.is_complete and len(resumption.done) == spec.num_chunks):
            return False
        with suppress(JobNotFoundError):
            self._queue.purge(spec.job_id)
        return True

    def check_predecessor(self, after: str) -> None:
        """Make sure that a new job may follow this one.

        Raises:
            JobNotFoundError: there is no such job (any more).
            JobStateError: it has failed or was canceled.
        """
        state = self._queue.status(after).state
        if state.is_final and not state.is_complete:
            raise JobStateError(f"job {after} is {state.value}: nothing can follow it")

    def _hold(self, spec: JobSpec, after: str, start_at: float) -> None:
        """See to it that a held job is started."""
        held = HeldJobs(self._redis, queue_name(spec.model))
        try:
            if not self._queue.status(spec.job_id).is_held:
                return
            hold(task_queue(self._redis, held.queue), held.queue, spec.job_id, after=after, start_at=start_at)
            if after and not held.start(spec.job_id):  # it has ended in this moment
                forget_start(self._redis, spec.job_id)
        except (QueueError, redis.RedisError) as error:
            # The job is queued, and workers look at held jobs by themselves.
            logger.warning("job %s may start up to %d s late: %s", spec.job_id, LOOK_S, error)

    def _take_output(self, folder: Place, job_id: str) -> None:
        """Make a folder that is to be overwritten this job's, before its rows are sent: no retry may begin there."""
        take_output(folder, job_id, self.refuse_running_output(folder, job_id))

    def refuse_running_output(self, folder: Place, job_id: str = "") -> str:
        """Raise OutputTakenError if another job of this Redis is about to write to a folder.

        Answers the job that the folder names, which is over, or this one; "" for none.
        """
        owner = output_owner(folder)
        if owner in ("", job_id):
            return owner
        with suppress(JobNotFoundError):  # lost, or of another Redis: nobody writes there
            state = self._queue.status(owner).state
            if not state.is_final:
                raise OutputTakenError(
                    f"{folder} is the output of job {owner}, which is {state.value}: cancel it first, or wait for its "
                    f"end (minisgl-batch status {owner})"
                )
        return owner

    def pause(self, model: str) -> bool:
        """Hand out nothing more of a model's jobs until `resume`; rows that run go on.

        Returns:
            Whether any job or worker of this model was ever seen: False may be a mistyped name.
        """
        return self._queue.pause(model)

    def resume(self, model: str) -> bool:
        """End a pause; tells whether there was one."""
        return self._queue.resume(model)

    def purge(self, *, model: str | None = None, older_than_s: float = 0.0) -> list[str]:
        """Forget all jobs that have ended, of one model or of all; their datasets stay. Answers their ids.

        Args:
            older_than_s: only those that ended so long ago.
        """
        purged = []
        for status in self._queue.jobs(model=model, limit=sys.maxsize):
            if status.state.is_final and status.now - (status.finished_at or 0.0) >= older_than_s:
                with suppress(JobNotFoundError, JobStateError):  # it has expired, or is retried
                    self.job(status.job_id).purge()
                    purged.append(status.job_id)
        return purged

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

    def overview(self, *, model: str | None = None, limit: int = 20) -> Overview:
        """The newest jobs and the living workers, of one model or of all: how far they are."""
        workers = self._queue.workers(model=model)
        jobs = self._queue.jobs(model=model, limit=limit)
        return Overview([measure(job, workers) for job in jobs], workers)

    def close(self) -> None:
        """Close the connection; handles of jobs end with it."""
        self._redis.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _unix_seconds(start_at: datetime | None) -> float:
    if start_at is None:
        return 0.0
    try:
        return datetime.fromtimestamp(start_at.timestamp(), timezone.utc).timestamp()
    except (AttributeError, ValueError, OverflowError, OSError):
        raise InvalidParameterError("start_at", f"must be a datetime that can be counted, got {start_at!r}") from None


def _sampling(params: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    known = frozenset((*SamplingParams.__struct_fields__, *inspect.signature(Client.submit).parameters))
    unknown = fields.keys() - known - UNSUPPORTED.keys()
    if unknown:
        raise no_such(min(unknown), "argument of submit, and no sampling parameter", known)
    return SamplingParams(**fields).over(params or SamplingParams())
