"""Finished results of a job wherever they are: in committed parts, and in Redis for chunks that are being worked on.

Knows where results are, but nothing of tokens or how results are shown. Called by clients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from minisgl_batch.errors import JobStateError, OutputError
from minisgl_jobs.dataset import check_dataset, read_batches
from minisgl_jobs.kept import add_columns, columns_of
from minisgl_jobs.model import RowResult
from minisgl_jobs.parts import output_place, part_name, read_part, read_part_table
from minisgl_jobs.places import Place
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.results import results_to_table, table_to_results
from minisgl_jobs.spool import decode_result
from minisgl_jobs.status import JobStatus


class JobResults:
    """The results of one job; reads anew with each call. The output folder must be in reach."""

    def __init__(self, queue: JobQueue, job_id: str) -> None:
        self._queue = queue
        self._job_id = job_id

    def batches(self, *, partial: bool = False) -> Iterator[pa.RecordBatch]:
        """The results in row order, a part at a time.

        Args:
            partial: those that are finished so far, while the job runs.

        Raises:
            JobNotFoundError: there is no such job (any more).
            JobStateError: the job hasn't ended, and `partial` wasn't asked for.
            OutputError: the folder isn't here or holds another job's dataset, or a part is missing or damaged.
        """
        status = self._queue.status(self._job_id)
        if status.state.is_final:
            _check_folder(status)
            return read_batches(output_place(status.spec.output))
        if not partial:
            raise JobStateError(
                f"job {self._job_id} is {status.state.value}: wait for its end, or ask for partial results"
            )
        chunks = range(status.spec.num_chunks)
        return (batch for table in self._tables(status, chunks) for batch in table.to_batches())

    def fetch(self, rows: Sequence[range]) -> Iterator[RowResult]:
        """Results of the rows in these ascending ranges, as far as there are any.

        Raises:
            JobNotFoundError: there is no such job (any more).
            OutputError: the folder isn't here or holds another job's dataset, or a part is damaged.
        """
        status = self._queue.status(self._job_id)
        size = status.spec.chunk_rows
        chunks = sorted({chunk for span in rows for chunk in range(span.start // size, -(-span.stop // size))})
        starts = [span.start for span in rows]
        for table in self._tables(status, chunks):
            for result in table_to_results(table):
                if result.row_index in rows[max(0, bisect_right(starts, result.row_index) - 1)]:
                    yield result

    def _tables(self, status: JobStatus, chunks: Iterable[int]) -> Iterator[pa.Table]:
        """The results of each of these chunks that has any."""
        _check_folder(status)
        under_way = {lease.chunk for lease in status.leases}
        if not status.state.is_final:
            under_way |= self._queue.handed_back(self._job_id)
        for chunk in chunks:
            # The spool first: it goes when the part comes.
            spooled = self._queue.spooled(self._job_id, chunk) if chunk in under_way else {}
            path = output_place(status.spec.output) / part_name(chunk)
            if path.is_file():
                yield _merge(path, chunk, spooled, status)
            elif spooled:
                table = results_to_table(map(decode_result, spooled.values()), status.spec.optional_columns)
                # What such rows keep of the input is in the workers' hands: null until their chunk is committed.
                yield add_columns(table, None, 0, status.spec.kept)


def _merge(path: Place, chunk: int, spooled: dict[tuple[int, int], bytes], status: JobStatus) -> pa.Table:
    """A part's results; where a retry runs its chunk again, with those that are new and without the old error rows."""
    table = read_part_table(path)
    if status.state.is_final or status.epoch == 0 or status.epoch == read_part(path).info.epoch:
        return table
    results = {(old.row_index, old.sample_index): old for old in table_to_results(table) if old.status == "ok"}
    results |= {key: decode_result(encoded) for key, encoded in spooled.items()}
    merged = results_to_table(results.values(), status.spec.optional_columns)
    rows = status.spec.chunk_range(chunk)
    return add_columns(merged, columns_of(table, rows, status.spec.kept), rows.start, status.spec.kept)


def _check_folder(status: JobStatus) -> None:
    folder = output_place(status.spec.output)
    if status.rows_done and not folder.is_dir():
        raise OutputError(
            f"{folder}, where the results of job {status.job_id} were written, isn't here: it was moved or removed, "
            "or it is on another machine, whose folder must be shared with this one"
        )
    check_dataset(folder, status.job_id)
