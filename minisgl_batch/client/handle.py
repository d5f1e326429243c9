"""One job from the outside: where it is, its tokens, its results, and what can be done to it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import nullcontext, suppress

import pyarrow as pa
import redis

from minisgl_batch.client.progress import Progress, measure
from minisgl_batch.client.show import JOB_COLUMNS, ProgressBar, html_table, job_row
from minisgl_batch.client.watching import Watcher
from minisgl_batch.errors import DamagedJobError, JobStateError, MiniSGLError, OutputError, UsageError
from minisgl_jobs.dataset import remove_dataset, reopen_dataset
from minisgl_jobs.folder_lock import lock_folder
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.job_results import JobResults
from minisgl_jobs.kept import kept_schema
from minisgl_jobs.keys import queue_name
from minisgl_jobs.model import JobSpec, JobState, RowResult
from minisgl_jobs.parts import output_place
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import Event, TokenReader
from minisgl_jobs.results import result_schema, table_to_results
from minisgl_jobs.status import JobStatus
from minisgl_jobs.tasks import forget_tasks
from minisgl_jobs.unserved import end_unserved

POLL_S = 0.1
_RESUME_HINT = "; to go on with it, submit the same input to the same output again"


class JobHandle:
    """One job of a Client.

    Its states (`JobState`): submitting, queued (held jobs too), running, canceling, finalising, and at last one of
    finished (every row succeeded), partial (complete, with error rows), failed and canceled. A retry takes a partial
    job back to queued.

    Methods raise JobNotFoundError when the job is gone (finished jobs expire), and RedisUnavailableError.
    """

    def __init__(self, client: redis.Redis, queue: JobQueue, job_id: str) -> None:
        self.id = job_id
        self._redis = client
        self._queue = queue
        self._results = JobResults(queue, job_id)

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    def _repr_html_(self) -> str:
        """How notebooks show it: a row with its state and progress at this moment."""
        try:
            return html_table(JOB_COLUMNS, [job_row(self.progress())])
        except MiniSGLError as error:
            return html_table(("JOB", "STATE"), [(self.id, str(error))])

    def status(self) -> JobStatus:
        """All that the queue knows about the job."""
        return self._queue.status(self.id)

    def progress(self) -> Progress:
        """How far the job is."""
        status = self.status()
        return measure(status, self._queue.workers(model=status.spec.model) if status.leases else ())

    def watch(self, poll_s: float = POLL_S) -> Iterator[Progress]:
        """The job's progress every `poll_s`, until it has ended. Puts up with a Redis that is away for two minutes.

        A job that only has to be ended, and whose model no worker serves any more, is ended by this.
        """
        watcher = self.watcher()
        while True:
            progress = watcher.look()
            if progress is not None:
                yield progress
                if progress.state.is_final:
                    return
            time.sleep(poll_s)

    def tend(self) -> None:
        """End a job that only has to be ended (it was canceled, say) and whose model no worker serves any more.

        `cancel`, `watch`, `wait` and `stream` do this too. Where there is nothing to do it does nothing.
        """
        end_unserved(self._redis, self.status())

    def watcher(self) -> Watcher:
        """For loops of one's own: what `watch` looks with."""
        return Watcher(self._redis, self.id, self.progress)

    def wait(self, timeout_s: float | None = None, *, show: bool = False) -> JobStatus:
        """Wait until the job has ended, and answer its last status.

        Args:
            timeout_s: at most so long; by default for ever.
            show: draw a progress bar meanwhile, in a notebook or on a terminal.

        Raises:
            JobTimeoutError: it hasn't ended within `timeout_s`; says what state it is in.
        """
        watcher = self.watcher()
        with ProgressBar() if show else nullcontext() as bar:
            while True:
                progress = watcher.look()
                if progress is not None and bar is not None:
                    bar.update(progress)
                if progress is not None and progress.state.is_final:
                    return progress.status
                watcher.check_time(timeout_s)
                time.sleep(POLL_S)

    def cancel(self) -> None:
        """Stop the job: its readers see it at once, rows that run stop, finished ones stay. May be repeated.

        Raises:
            JobStateError: it has ended otherwise, or all of its rows are done.
        """
        self._queue.cancel(self.id)
        with suppress(DamagedJobError):  # it ends all the same; purge forgets it
            self.tend()

    def retry(self) -> None:
        """Generate the error rows of a partial job again, into the same dataset; the other rows stay as they are.

        Until the job has ended again the dataset has no `_SUCCESS`; its manifest and parts can be read all the time.

        Raises:
            JobStateError: the job isn't partial.
            OutputError: the output folder can't be written, holds another job's dataset by now, or a `run` has it.
        """
        status = self.status()
        if status.state is not JobState.PARTIAL:
            hint = "" if not status.state.is_final or status.state.is_complete else _RESUME_HINT
            raise JobStateError(f"job {self.id} can't be retried: it is {status.state.value}, not partial{hint}")
        folder = output_place(status.spec.output)
        with lock_folder(folder, alone=False):
            if folder.is_dir():
                reopen_dataset(folder, self.id)
            self._queue.retry(self.id)

    def purge(self, *, output: bool = False) -> None:
        """Forget a job that has ended, before its keys in Redis expire by themselves.

        Args:
            output: remove its dataset, too; other files in the folder stay.

        Raises:
            JobStateError: it hasn't ended.
            OutputError: the dataset isn't here or can't be removed, the folder holds another one by now, or a `run` has
                it; nothing is forgotten.
        """
        try:
            status = self.status()
        except DamagedJobError as error:
            if output:
                raise
            self._queue.fail(self.id, str(error))
            self._queue.purge(self.id)
            return
        if not status.state.is_final:
            raise JobStateError(f"job {self.id} is {status.state.value}: cancel it before it is purged")
        folder = output_place(status.spec.output)
        if output and not folder.is_dir():
            raise OutputError(f"{folder} isn't on this machine (any more): purge job {self.id} without its output")
        if output:
            with lock_folder(folder, alone=False):
                remove_dataset(folder, self.id)
        for queue, follower in HeldJobs(self._redis, queue_name(status.spec.model)).followers(self.id):
            HeldJobs(self._redis, queue).start(follower)  # while it can be seen how this one has ended
        self._queue.purge(self.id)
        forget_tasks(self._redis, self.id, status.epoch)

    def stream(self, rows: Collection[int] | None = None) -> Iterator[Event]:
        """Every token once, whenever the caller comes: RowStarted, RowText and RowFinished as they happen.

        The texts of a sample since its last RowStarted, put together, are its text, and those with `is_reasoning` the
        reasoning that was split off. Ends with the job.

        Args:
            rows: indices of the rows to read; by default all.

        Raises:
            UsageError: the job has no such row.
            OutputError: finished rows are in a folder that isn't here.
        """
        return iter(self.open_reader(rows))

    def open_reader(self, rows: Collection[int] | None = None) -> TokenReader:
        """What `stream` iterates over. Arguments and errors as there."""
        num_rows = self.status().spec.num_rows
        for row in rows or ():
            if not 0 <= row < num_rows:
                raise UsageError(f"job {self.id} has no row {row}: its rows are 0 to {num_rows - 1}")
        return TokenReader(self._redis, self.id, self._results.fetch, rows=rows, on_look=self.tend)

    def results(self, *, partial: bool = False) -> pa.Table:
        """The results as an Arrow table. Arguments and errors as `batches`."""
        batches = list(self.batches(partial=partial))
        schema = batches[0].schema if batches else _schema(self.status().spec)
        return pa.Table.from_batches(batches, schema)

    def rows(self, *, partial: bool = False) -> Iterator[RowResult]:
        """The results one by one, in row order. Arguments and errors as `batches`."""
        for batch in self.batches(partial=partial):
            yield from self.rows_of(batch)

    def rows_of(self, batch: pa.RecordBatch) -> list[RowResult]:
        """The results in one of `batches`."""
        return list(table_to_results(pa.Table.from_batches([batch])))

    def batches(self, *, partial: bool = False) -> Iterator[pa.RecordBatch]:
        """The results in row order, a part of the dataset at a time: for more than fits into memory.

        Args:
            partial: those that are finished so far, while the job runs.

        Raises:
            JobStateError: the job hasn't ended, and `partial` wasn't asked for.
            OutputError: the output folder isn't on this machine, or is damaged.
        """
        return self._results.batches(partial=partial)


def _schema(spec: JobSpec) -> pa.Schema:
    fields = [*result_schema(spec.optional_columns), *kept_schema(spec.kept)]
    return pa.schema(fields)
