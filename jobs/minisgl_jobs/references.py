"""A chunk's rows, wherever they are: in its payload, or in the job's input, which this process reads again.

Rows that are read again must be those that were checked at the submit: their hash says so. Knows nothing of Redis.
Called by frontends, by finalise, and by clients that look at what they submit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from minisgl_batch.errors import InputUnreachableError, InvalidInputError, QueueError, UsageError
from minisgl_jobs.chunks import ChunkReference, RowsAndColumns, chunk_sha256, decode_payload
from minisgl_jobs.inputs import open_records
from minisgl_jobs.kept import decode_table, typed
from minisgl_jobs.model import InputReference, JobSpec, Row, RowError
from minisgl_jobs.places import Place, place
from minisgl_jobs.records import Record, RecordFile
from minisgl_jobs.roots import AllowedRoots
from minisgl_jobs.rows import ReadOptions, RowReader

_MAX_OPEN = 4  # inputs that are read in turn


@dataclass(frozen=True)
class ChunkRows:
    """A chunk as it is worked on.

    Attributes:
        rows: all of them; those that can't be used say why.
        sha256: what identifies them; "" when they aren't those that were submitted.
        kept: input columns for the output, typed; None when there are none or they can't be had.
    """

    rows: list[Row]
    sha256: str
    kept: pa.Table | None = None


class ChunkReader:
    """Reads chunks. For one thread. Inputs stay open, so that chunks in turn are read as one stream."""

    def __init__(self, roots: AllowedRoots | None = None) -> None:
        """
        Args:
            roots: what may be read; by default everything.
        """
        self._roots = roots or AllowedRoots()
        self._open: OrderedDict[tuple[InputReference, str], RecordFile] = OrderedDict()

    def read(self, spec: JobSpec, chunk: int, payload: bytes) -> ChunkRows:
        """A chunk's rows. What is damaged or has changed since the submit becomes error rows.

        Raises:
            InputUnreachableError: this machine can't read the input, or may not.
        """
        try:
            found = decode_payload(payload)
        except QueueError as error:
            return _failed(spec, chunk, RowError("damaged_payload", str(error)))
        if isinstance(found, ChunkReference):
            return self._read_reference(spec, chunk, found)
        rows, kept = (found.rows, decode_table(found.kept)) if isinstance(found, RowsAndColumns) else (found, None)
        if [row.row_index for row in rows] != list(spec.chunk_range(chunk)):
            reason = f"it holds {len(rows)} rows that are not those of chunk {chunk}"
            return _failed(spec, chunk, RowError("damaged_payload", f"a chunk's payload is damaged: {reason}"))
        return ChunkRows(rows, chunk_sha256(rows, kept), _typed(kept, spec))

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].close()

    def _read_reference(self, spec: JobSpec, chunk: int, reference: ChunkReference) -> ChunkRows:
        source = spec.reference
        if source is None:
            return _failed(spec, chunk, RowError("damaged_payload", "the job doesn't say where its input is"))
        rows: list[Row] = []
        kept: pa.Table | None = None
        reason = "its rows differ"
        try:
            rows, kept = self._read_rows(spec, source, chunk, reference)
        except InputUnreachableError:
            raise
        except InvalidInputError as error:  # it is there, and isn't what it was
            reason = str(error)
        if rows and chunk_sha256(rows, kept) == reference.sha256.hex():
            return ChunkRows(rows, reference.sha256.hex(), _typed(kept, spec))
        self.close()
        span = spec.chunk_range(chunk)
        where = f"rows with row_index {span.start} to {span.stop - 1}: {reason}"
        problem = f"{source.uri} has changed since the job was submitted ({where})"
        return _failed(spec, chunk, RowError("input_changed", f"{problem}; submit it again"))

    def _read_rows(
        self, spec: JobSpec, source: InputReference, chunk: int, reference: ChunkReference
    ) -> tuple[list[Row], pa.Table | None]:
        span = spec.chunk_range(chunk)
        options = ReadOptions(
            template=source.template,
            prompt_column=source.prompt_column,
            messages_column=source.messages_column,
            settings=source.settings,
            keep_columns=source.keep_columns,
            system=spec.system,
            chat=source.chat,
            on_error="record",
        )
        reader = RowReader(source.uri, options, first_row=span.start, is_whole=False)
        rows: list[Row] = []
        for number, name in enumerate(reference.files):
            file = self._file(
                source, name, options, *((reference.position, reference.lines_read) if number == 0 else (0, 0))
            )
            found = reader.read(_records(file), _At(name, file))
            rows += [row for row in islice(found, len(span) - len(rows)) if isinstance(row, Row)]
        known = {row.row_index: row for row in reference.faulty}
        return [known.get(row.row_index, row) for row in rows], reader.kept.take()

    def _file(
        self, source: InputReference, name: str, options: ReadOptions, position: int, lines_read: int
    ) -> RecordFile:
        """The file where the position is, open already if that lies behind the last chunk's."""
        self._roots.check_reading(f"{source.uri.rstrip('/')}/{name}" if name else source.uri)
        path = _path(source, name)
        self._roots.check_reading(path)
        key = (source, name)
        file = self._open.pop(key, None)
        if file is not None and file.position > position:
            file.close()
            file = None
        if file is None:
            file = open_records(path, str(path), options.columns, hashed=False, pipes=False)
        if file.position != position:
            file.skip_to(position, lines_read)
        self._open[key] = file
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return file


@dataclass
class _At:
    """Where records of one file are."""

    file: str
    _records: RecordFile
    place: str = ""  # which rows are faulty is known, and why

    @property
    def line(self) -> int:
        return self._records.line


def _records(file: RecordFile) -> Iterator[Record]:
    return iter(file)


def _path(source: InputReference, name: str) -> Place:
    try:
        root = place(source.uri)
    except UsageError as error:
        raise InputUnreachableError(f"{source.uri} can't be read here: {error}") from None
    return root / name if name else root


def _typed(kept: pa.Table | None, spec: JobSpec) -> pa.Table | None:
    return None if kept is None else typed(kept, spec.kept)


def _failed(spec: JobSpec, chunk: int, error: RowError) -> ChunkRows:
    return ChunkRows([Row(index, error=error) for index in spec.chunk_range(chunk)], "")
