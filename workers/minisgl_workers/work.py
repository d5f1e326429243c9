"""A chunk while this group works on it: which rows are left, which results are there, what to run next.

Pure bookkeeping: no Redis, no engine, no files. Used by `delivery` and `frontend`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from minisgl_batch.errors import RequestError
from minisgl_batch.tokenizer import Logprobs, SampleOutput
from minisgl_jobs.leases import Lease
from minisgl_jobs.model import EngineInfo, Row, RowError, RowResult, TokenLogprobs
from minisgl_jobs.references import ChunkRows
from minisgl_jobs.results import check_complete, samples_of
from minisgl_jobs.spool import decode_result

SOLO_PARTS = 16  # a chunk under suspicion runs in so many parts, a suspect part again


class ChunkWork:
    """One leased chunk.

    Attributes:
        lease: the right to it.
        input_sha256: what identifies its rows.
        kept: input columns for the output.
        results: (row, sample) -> result of all that is finished.
        engines: what has generated those of them that others had finished before.
        unspooled: keys of results that Redis hasn't got yet.
        num_told: rows that are finished as far as Redis knows.
        is_stopped: its rows run no more, and nothing of it will be committed.
        is_written: its part is on disk under its pending name.
    """

    def __init__(self, lease: Lease, chunk: ChunkRows) -> None:
        self.lease = lease
        self.input_sha256 = chunk.sha256
        self.kept = chunk.kept
        self.results: dict[tuple[int, int], RowResult] = {}
        self.engines: list[EngineInfo] = [*lease.engines] if lease.spooled else []
        self.unspooled: list[tuple[int, int]] = []
        self.num_told = 0
        self.is_stopped = False
        self.is_written = False
        rows = chunk.rows
        self._num_samples = {row.row_index: samples_of(row, lease.spec.params) for row in rows}
        self._left = dict(self._num_samples)
        for encoded in lease.spooled.values():
            self._keep(decode_result(encoded))
        for row in rows:
            if self._left.get(row.row_index) is None:
                continue
            if row.error is not None:
                self.fail(row, row.error)
            elif row.row_index in lease.lost_rows:
                self.fail(row, RowError("worker_lost", "the worker died twice while it ran this row alone"))
        self._parts = self._plan([row for row in rows if row.row_index in self._left])
        self._started: set[int] = set()  # rows of the part that runs

    def keep(self, results: Iterable[RowResult], engines: Iterable[EngineInfo] = ()) -> None:
        """Take results that are on disk already, before the first part runs; those that are here stay as they are.

        Args:
            engines: what has generated them.
        """
        self.engines += engines
        for result in results:
            key = (result.row_index, result.sample_index)
            if key not in self.results and result.sample_index < self._num_samples.get(result.row_index, 0):
                self._keep(result)
        self._parts = self._plan([row for part in self._parts for row in part if row.row_index in self._left])

    @property
    def job_id(self) -> str:
        return self.lease.spec.job_id

    @property
    def num_left(self) -> int:
        """Samples that are not finished."""
        return sum(self._left.values())

    @property
    def num_finished(self) -> int:
        """Rows that are finished, with all of their samples."""
        return len(self._num_samples) - len(self._left)

    @property
    def is_complete(self) -> bool:
        return not self._left

    def next_part(self) -> list[Row] | None:
        """The rows to run next, until `start` is told; None while a part runs, or when none is left.

        A solo chunk runs in parts, so that a death points to few rows; any other is one part.
        """
        return self._parts[0] if self._parts and not self._started & self._left.keys() else None

    def start(self, part: list[Row]) -> None:
        """The part that `next_part` gave runs from now on."""
        self._parts.remove(part)
        self._started = {row.row_index for row in part}

    def spool_again(self) -> None:
        """Redis may have lost results that it had: give it all of them once more."""
        self.unspooled = list(self.results)

    def missing_samples(self, row: Row) -> list[int]:
        """Samples of a row that are not finished; a chunk that was taken over may have some of them."""
        wanted = range(self._num_samples[row.row_index])
        return [sample for sample in wanted if (row.row_index, sample) not in self.results]

    def finish(
        self,
        row: Row,
        sample_index: int,
        seed: int,
        started_at: float,
        sample: SampleOutput,
        text_of: Callable[[int], str],
    ) -> None:
        """Take a sample that the engine finished or refused; `text_of` gives a token's text."""
        error = None if sample.error is None else RowError(sample.error.error_type, str(sample.error))
        first = sample.first_token_s
        self._add(
            RowResult(
                row_index=row.row_index,
                sample_index=sample_index,
                custom_id=row.custom_id or None,
                status="ok" if error is None else "error",
                text=sample.text,
                finish_reason=sample.finish_reason,
                stop_reason=None if sample.stop_reason is None else str(sample.stop_reason),
                prompt_tokens=sample.prompt_tokens,
                cached_tokens=sample.cached_tokens,
                completion_tokens=len(sample.token_ids),
                output_token_ids=sample.token_ids if self.lease.spec.token_ids else None,
                logprobs=_record(sample.logprobs, text_of, has_gap=False),
                prompt_logprobs=_record(sample.prompt_logprobs, text_of, has_gap=True),
                seed=seed,
                error=error,
                model=self.lease.spec.model,
                queued_at=self.lease.spec.submitted_at,
                started_at=started_at,
                finished_at=time.time(),
                ttft_ms=None if first is None else (first - started_at) * 1000,
                metadata=row.metadata or None,
                reasoning_text=sample.reasoning_text,
                raw_text=sample.raw_text,
                choices=sample.choices,
            )
        )

    def fail(self, row: Row, error: RowError | RequestError) -> None:
        """Take a row that can't be run (any more): it has one result, but finished samples stay beside the others'."""
        if isinstance(error, RequestError):
            error = RowError(error.error_type, str(error))
        missing = self.missing_samples(row)
        for sample_index in missing if len(missing) < self._num_samples[row.row_index] else [0]:
            self._add(
                RowResult(
                    row_index=row.row_index,
                    sample_index=sample_index,
                    custom_id=row.custom_id or None,
                    status="error",
                    finish_reason="error",
                    error=error,
                    model=self.lease.spec.model,
                    queued_at=self.lease.spec.submitted_at,
                    finished_at=time.time(),
                    metadata=row.metadata or None,
                )
            )
        self._left.pop(row.row_index, None)

    def count_rows(self) -> tuple[int, int]:
        """(rows without an error, rows with one) of a complete chunk.

        Raises:
            ValueError: the results are not those of the chunk's rows; a defect of ours.
        """
        check_complete(list(self.results.values()), self._num_samples)
        failed = {row for (row, _), result in self.results.items() if result.status == "error"}
        return len(self._num_samples) - len(failed), len(failed)

    def num_samples(self, row_index: int) -> int:
        return self._num_samples[row_index]

    def _add(self, result: RowResult) -> None:
        self._keep(result)
        self.unspooled.append((result.row_index, result.sample_index))

    def _keep(self, result: RowResult) -> None:
        self.results[result.row_index, result.sample_index] = result
        left = self._left.get(result.row_index, 0) - 1
        if left > 0:
            self._left[result.row_index] = left
        else:
            self._left.pop(result.row_index, None)

    def _plan(self, rows: list[Row]) -> list[list[Row]]:
        if not self.lease.is_solo:
            return [rows] if rows else []
        return list(_solo_parts(rows, len(self.lease.rows), self.lease.suspect))


def _record(found: Logprobs | None, text_of: Callable[[int], str], *, has_gap: bool) -> TokenLogprobs | None:
    if found is None:
        return None
    ids = set(found.token_ids.tolist()).union(*found.top_ids.tolist())
    return TokenLogprobs(
        token_ids=found.token_ids.astype("<i4").tobytes(),
        logprobs=found.logprobs.astype("<f4").tobytes(),
        top_ids=found.top_ids.astype("<i4").tobytes(),
        top_logprobs=found.top_logprobs.astype("<f4").tobytes(),
        texts={token: text_of(token) for token in sorted(ids)},
        has_gap=has_gap,
    )


def _solo_parts(rows: list[Row], chunk_rows: int, suspect: range | None) -> Iterator[list[Row]]:
    """A suspect chunk in sixteenths; the part that ran at its last death first, in sixteenths of its own."""
    if suspect is not None:
        yield from _split([row for row in rows if row.row_index in suspect], len(suspect))
        rows = [row for row in rows if row.row_index not in suspect]
    yield from _split(rows, chunk_rows)


def _split(rows: Iterable[Row], num_rows: int) -> Iterator[list[Row]]:
    """Runs of neighbouring rows, a sixteenth of `num_rows` long."""
    size = -(-num_rows // SOLO_PARTS)
    part: list[Row] = []
    for row in rows:
        if part and (row.row_index != part[-1].row_index + 1 or len(part) == size):
            yield part
            part = []
        part.append(row)
    if part:
        yield part
