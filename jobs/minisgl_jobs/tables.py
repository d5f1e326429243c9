"""Reads Parquet and Arrow files row by row, from any row on, without ever holding more than a batch.

Knows nothing of prompts. Called by `inputs.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from minisgl_batch.errors import InvalidInputError
from minisgl_jobs.fields import PARAM_FIELDS
from minisgl_jobs.model import InputInfo
from minisgl_jobs.places import Place, num_bytes, open_binary
from minisgl_jobs.records import TableRow, check_columns, field_of, settings_columns, tidy
from minisgl_jobs.sources import reading

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
BATCH_ROWS = 512
_HASH_BYTES = 1 << 20


def is_table(head: bytes) -> bool:
    """Whether a file that begins so is one of Parquet or Arrow."""
    return head.startswith((PARQUET, ARROW_FILE, ARROW_STREAM))


class TableFile:
    """One file as a `RecordFile`. Its positions are row numbers from 0.

    Raises:
        InvalidInputError: it is damaged, lacks a column, has one twice, or one whose type is of no use here.
    """

    def __init__(
        self,
        path: Place,
        name: str,
        head: bytes,
        *,
        wanted: Mapping[str, str],
        keep: Sequence[str],
        settings: bool = True,
        hashed: bool = True,
    ) -> None:
        """
        Args:
            name: the file's in messages.
            head: its first bytes.
            wanted: column that makes the prompts -> the option that names it; without any, columns mean what they are
                called.
            keep: columns that are copied to the output.
            settings: whether, beside those wanted, columns mean something by their names.
            hashed: whether `info` is to tell the SHA-256; of remote files it never does, which would read them twice.
        """
        self.position = 0
        self.line = 0
        self._name = name
        self._path = path
        self._hashed = hashed
        self._keep = list(keep)
        with reading(name):
            self._raw = open_binary(path)
            try:
                self._table = _open(pa.PythonFile(self._raw, mode="r"), path, head)
            except BaseException:
                self._raw.close()
                raise
        columns = self._table.schema.names
        try:
            check_columns(name, columns, wanted, keep, settings=settings)
            used = [*wanted, *(settings_columns(columns, wanted) if settings else ())]
            self._used = {column: field_of(column, wanted) for column in used}
            self._columns = list(dict.fromkeys([*self._used, *self._keep]))
            self._check_schema()
        except BaseException:
            self._raw.close()
            raise
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._current: pa.RecordBatch | None = None  # which rows are given from, from `_offset` on
        self._offset = 0
        self._schema = pa.schema([_plain(self._table.schema.field(name)) for name in keep])

    def __iter__(self) -> Iterator[TableRow]:
        with reading(self._name):
            while self._current is not None or self._advance():
                yield from self._rows()

    @property
    def lines_read(self) -> int:
        return self.position

    def skip_to(self, position: int, lines_read: int) -> None:
        """Go on with the row at `position`, which isn't before the present one."""
        with reading(self._name):
            if self._batches is None:
                self._batches = self._table.batches(position, self._columns)
            else:
                self._skip(position - self.position)
        self.position, self.line = position, lines_read

    def info(self) -> InputInfo:
        """The file's size and, of a local file, its hash."""
        with reading(self._name):
            digest = _sha256(self._path) if self._hashed and isinstance(self._path, Path) else ""
            return InputInfo(self._name, digest, num_bytes(self._path))

    def close(self) -> None:
        self._raw.close()

    def _check_schema(self) -> None:
        """Raise InvalidInputError for a column that is there twice, or that holds what can't be text or a setting."""
        names = self._table.schema.names
        for column in self._columns:
            if names.count(column) > 1:
                raise InvalidInputError(
                    f"{self._name} has {names.count(column)} columns called {column!r}: rename all but one"
                )
        for column in self._used:
            kind = self._table.schema.field(column).type
            if not _is_json(kind):
                raise InvalidInputError(
                    f"{self._name}: column {column!r} is of type {kind}, which can't stand in a prompt or a setting: "
                    "convert it to text, or leave it out"
                )

    def _advance(self) -> bool:
        """Go on to the next batch; False at the end."""
        if self._batches is None:
            self._batches = self._table.batches(self.position, self._columns)
        self._current, self._offset = next(self._batches, None), 0
        return self._current is not None

    def _skip(self, num_rows: int) -> None:
        while num_rows and (self._current is not None or self._advance()):
            assert self._current is not None
            step = min(num_rows, self._current.num_rows - self._offset)
            self._offset += step
            num_rows -= step
            if self._offset == self._current.num_rows:
                self._current = None

    def _rows(self) -> Iterator[TableRow]:
        """The rest of the current batch."""
        batch = self._current
        assert batch is not None
        if self._offset == batch.num_rows:
            self._current = None
        values = {
            name: _cells(batch.column(name), is_setting=field in PARAM_FIELDS) for name, field in self._used.items()
        }
        kept = None
        if self._keep:
            arrays = [batch.column(field.name).cast(field.type) for field in self._schema]
            kept = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        for number in range(self._offset, batch.num_rows):
            tidied = {name: tidy(self._used[name], cells[number], is_text=False) for name, cells in values.items()}
            row = {name: value for name, value in tidied.items() if value is not None}
            self._offset = number + 1
            self.position += 1
            self.line = self.position
            if self._offset == batch.num_rows:
                self._current = None
            yield TableRow(row, kept=kept, number=number)


class _Parquet:
    def __init__(self, file: Any) -> None:
        self._file = pq.ParquetFile(file)
        self.schema: pa.Schema = self._file.schema_arrow

    def batches(self, start: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        metadata = self._file.metadata
        group = 0
        while group < metadata.num_row_groups and start >= metadata.row_group(group).num_rows:
            start -= metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, metadata.num_row_groups))
        yield from _from(start, self._file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns))


class _Arrow:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.schema: pa.Schema = reader.schema

    def batches(self, start: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        reader = self._reader
        found = (reader.get_batch(i) for i in range(reader.num_record_batches)) if _is_file(reader) else iter(reader)
        for batch in _from(start, found):
            chosen = batch.select(columns)
            yield from (chosen.slice(row, BATCH_ROWS) for row in range(0, chosen.num_rows, BATCH_ROWS))


def _is_file(reader: Any) -> bool:
    return isinstance(reader, pa.ipc.RecordBatchFileReader)


def _open(file: Any, path: Place, head: bytes) -> _Parquet | _Arrow:
    if head.startswith(PARQUET):
        return _Parquet(file)
    # Not mapped into memory: a file that is cut short meanwhile would end the process.
    source = pa.OSFile(str(path)) if isinstance(path, Path) else file
    return _Arrow(pa.ipc.open_file(source) if head.startswith(ARROW_FILE) else pa.ipc.open_stream(source))


def _from(start: int, batches: Any) -> Iterator[pa.RecordBatch]:
    """The batches from a row on."""
    for batch in batches:
        if start < batch.num_rows:
            yield batch.slice(start)
        start = max(0, start - batch.num_rows)


def _is_json(kind: pa.DataType, *, is_nested: bool = False) -> bool:
    """Whether JSON can hold the values that `_cells` makes of a column of this type."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_json(kind.storage_type, is_nested=is_nested)
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type, is_nested=is_nested)
    if pa.types.is_nested(kind):
        fields = [kind.field(i).name for i in range(kind.num_fields)]
        if pa.types.is_struct(kind) and len({*fields}) < len(fields):
            return False
        return all(_is_json(kind.field(i).type, is_nested=True) for i in range(kind.num_fields))
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return not is_nested  # inside of lists and structs they stay what they are in Python
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return not any(is_binary(kind) for is_binary in binary)


def _cells(column: pa.Array, *, is_setting: bool) -> list[Any]:
    """The values as JSON has them; dates, decimals and the like as text, but decimals of settings as numbers."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_decimal(kind) and is_setting:
        return [None if value is None else _number(value) for value in column.to_pylist()]
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.string())
    cells: list[Any] = column.to_pylist()
    return cells


def _number(value: Decimal) -> int | float:
    """A whole one exactly: a seed has more digits than a float."""
    return int(value) if value == value.to_integral_value() else float(value)


def _plain(field: pa.Field) -> pa.Field:
    """Without its dictionary, which differs between files."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
