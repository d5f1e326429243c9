"""A worker group without an engine: a thread that answers each row with its own prompt, through the real queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import redis

from minisgl_jobs.finalise import finalise
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.kept import add_columns
from minisgl_jobs.leases import ChunkQueue, Lease, Renewal
from minisgl_jobs.model import Row, RowError, RowResult
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.parts import PartInfo, commit_part, write_part
from minisgl_jobs.references import ChunkReader, ChunkRows
from minisgl_jobs.results import results_to_table, samples_of
from minisgl_jobs.spool import encode_result
from minisgl_jobs.status import WorkerInfo
from minisgl_jobs.streams import RowDelta, RowEnd, TokenPublisher

MODEL = "echo"
GROWING = "half of an ans"


def answer(row: Row, sample: int = 0) -> str:
    """What the worker says to a row."""
    text = row.prompt if row.prompt is not None else str((row.messages or [{}])[-1].get("content"))
    return f"echo {text}" if sample == 0 else f"echo {text} ({sample})"


class EchoWorker(threading.Thread):
    """Use as a context manager.

    A row whose prompt begins with "fail" becomes an error row; one of a single token says that it was cut. With `hold`,
    the worker stops in the middle of each chunk: the first half of its rows is spooled, and the next row has the text
    GROWING, until `go_on` is set.
    """

    def __init__(self, client: redis.Redis, *, hold: bool = False, worker_id: str = "echo-1") -> None:
        super().__init__(name=worker_id, daemon=True)
        self.go_on = threading.Event()
        if not hold:
            self.go_on.set()
        self._queue = ChunkQueue(client, MODEL, worker_id, lease_s=5.0)
        self._outbox = Outbox(client, self._queue.keys.queue)
        self._held = HeldJobs(client, self._queue.keys.queue)
        self._client = client
        self._publisher = TokenPublisher(client, MODEL)
        self._info = WorkerInfo(
            worker_id,
            MODEL,
            host="here",
            pid=1,
            since=time.time(),
            tokens_per_s=123.0,
            prompt_tokens=200,
            cached_tokens=50,
            description={"device": "none"},
        )
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            self._queue.heartbeat(self._info)
            lease = self._queue.take()
            if lease is not None:
                self._serve(lease)
            while (claim := self._outbox.claim(60)) is not None:
                finalise(self._outbox, claim.job_id, claim.epoch)
                for queue, follower in self._held.followers(claim.job_id):
                    HeldJobs(self._client, queue).start(follower)
            while (held := self._held.claim()) is not None:
                self._held.start(held)
            if lease is None:
                self._queue.wait_for_work(0.02)

    def _serve(self, lease: Lease) -> None:
        chunk = ChunkReader().read(lease.spec, lease.chunk, lease.payload)
        rows = chunk.rows
        half = len(rows) // 2
        results = self._finish(lease, rows[:half])
        while not self.go_on.is_set():
            (renewal,) = self._queue.renew([lease])
            if renewal is not Renewal.OK or self._stopping.is_set():
                self._queue.handback([lease])
                return
            if self._publisher.poll([lease.spec.job_id]):
                delta = RowDelta(rows[half].row_index, 0, lease.attempt, 0, GROWING)
                self._publisher.add(lease.spec.job_id, delta)
            self._publisher.flush()
            self.go_on.wait(0.01)
        results += self._finish(lease, rows[half:])
        self._commit(lease, chunk, results)

    def _finish(self, lease: Lease, rows: Sequence[Row]) -> list[RowResult]:
        """Make and spool the results of rows, and tell their readers."""
        results = [result for row in rows for result in _results(lease, row)]
        encoded = {(r.row_index, r.sample_index): encode_result(r) for r in results}
        self._queue.spool(lease, encoded, num_rows=len(rows))
        self._publisher.poll([lease.spec.job_id])
        for result in results:
            samples = sum(other.row_index == result.row_index for other in results)
            ending = (result.status, result.finish_reason, len(result.text), samples, result.prompt_tokens)
            end = RowEnd(*ending, result.completion_tokens, result.error, result.custom_id)
            key = (result.row_index, result.sample_index)
            self._publisher.add(lease.spec.job_id, RowDelta(*key, lease.attempt + 1, 0, result.text, end))
        self._publisher.flush()
        return results

    def _commit(self, lease: Lease, chunk: ChunkRows, results: Sequence[RowResult]) -> None:
        spec, folder, num_rows = lease.spec, Path(lease.spec.output), len(chunk.rows)
        table = results_to_table(results, spec.optional_columns)
        table = add_columns(table, chunk.kept, lease.rows.start, spec.kept)
        info = PartInfo(
            job_id=spec.job_id,
            chunk=lease.chunk,
            epoch=lease.epoch,
            input_sha256=chunk.sha256,
            num_rows=table.num_rows,
        )
        write_part(folder, table, info, lease.token)
        failed = {result.row_index for result in results if result.error is not None}
        self._queue.complete(lease, rows_ok=num_rows - len(failed), rows_error=len(failed))
        commit_part(folder, lease.chunk, lease.epoch, lease.token)
        self._queue.renamed([lease])

    def __enter__(self) -> EchoWorker:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.join(10)
        self._queue.leave()


def _results(lease: Lease, row: Row) -> list[RowResult]:
    error = row.error
    if error is None and answer(row).startswith("echo fail"):
        error = RowError("refused", "the prompt asks for it")
    now = time.time()
    if error is not None:
        failed = RowResult(
            row.row_index, custom_id=row.custom_id or None, status="error", finish_reason="error", error=error
        )
        return [failed]
    return [
        RowResult(
            row_index=row.row_index,
            sample_index=sample,
            custom_id=row.custom_id or None,
            text=answer(row, sample),
            finish_reason="length" if row.params.over(lease.spec.params).max_tokens == 1 else "stop",
            prompt_tokens=10,
            cached_tokens=5,
            completion_tokens=len(answer(row, sample)),
            model=lease.spec.model,
            seed=1,
            started_at=now,
            finished_at=now,
            metadata=row.metadata or None,
        )
        for sample in range(samples_of(row, lease.spec.params))
    ]
