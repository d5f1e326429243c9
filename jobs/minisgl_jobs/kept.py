"""Input columns that are copied to the output (`--keep-columns`), typed as in the input.

A table's columns keep their Arrow types. In JSONL and CSV a column's type shows only when all rows were read, so their
values (of CSV, texts) travel as JSON and get their types when a part is written. Knows nothing of files. Called by
submissions, which collect them, and by whoever writes parts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from minisgl_batch.errors import InvalidInputError
from minisgl_jobs.records import Record, TableRow
from minisgl_jobs.results import OPTIONAL_COLUMNS, result_schema

_AS_JSON = b"minisgl_json"  # in the metadata of a schema whose columns travel as JSON
_INT64 = range(-(1 << 63), 1 << 63)
_EXACT_IN_FLOAT64 = range(-(1 << 53), (1 << 53) + 1)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # as in JSON: 007 is a text
_MAX_NUMBER_CHARS = 400
_FLAGS = {text: text.lower() == "true" for text in ("true", "false", "True", "False", "TRUE", "FALSE")}
_LIST = "list of "


class KeptRows:
    """Collects the kept columns of rows, one `add` a row, and gives them out a chunk at a time."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._rows: list[tuple[pa.RecordBatch, int] | tuple[str | None, ...]] = []
        self._kinds: list[set[str]] = [set() for _ in columns]
        self._schema: pa.Schema | None = None

    def add(self, record: Record, fields: dict[str, Any]) -> None:
        """Take those of a record, whose fields a line of JSON has given.

        Raises:
            InvalidInputError: its file has other types than those before.
        """
        if isinstance(record, TableRow) and record.kept is not None:
            if self._schema is None:
                self._schema = record.kept.schema
            elif not self._schema.equals(record.kept.schema):
                raise InvalidInputError(
                    f"the files have columns of different types, which can't be kept together: {self._schema} and "
                    f"{record.kept.schema}"
                )
            self._rows.append((record.kept, record.number))
            return
        if isinstance(record, TableRow):
            values: Sequence[Any] = record.cells or (None,) * len(self._columns)
            kinds_of: Callable[[Any], Iterable[str]] = _cell_kinds
        else:
            values, kinds_of = [fields.get(column) for column in self._columns], _kinds
        for column, kinds, value in zip(self._columns, self._kinds, values, strict=True):
            if value is None:
                kinds.update(("nothing",) if column in fields else ())
            elif "text" not in kinds:
                kinds.update(kinds_of(value))
        self._rows.append(tuple(None if value is None else json.dumps(value, ensure_ascii=False) for value in values))

    def take(self) -> pa.Table | None:
        """The columns of the rows since the last time; None when no columns are kept."""
        rows, self._rows = self._rows, []
        if not self._columns:
            return None
        if self._schema is None:
            columns: list[Any] = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in self._columns]
            return pa.table([pa.array(column, pa.string()) for column in columns], names=list(self._columns))
        return pa.Table.from_batches(list(_runs(rows)), self._schema)

    def schema(self) -> bytes:
        """What `typed` needs to know, once all rows are there; b"" when no columns are kept.

        Raises:
            InvalidInputError: no row has a column, or its name in the output would be there twice.
        """
        if not self._columns:
            return b""
        names = output_names(self._columns)
        if self._schema is not None:
            fields = [pa.field(name, field.type) for name, field in zip(names, self._schema, strict=True)]
            return bytes(pa.schema(fields).serialize())
        for column, kinds in zip(self._columns, self._kinds, strict=True):
            if not kinds:
                raise InvalidInputError(f"no row has {column!r}, which `keep_columns` names")
        fields = [pa.field(name, _common_type(kinds)) for name, kinds in zip(names, self._kinds, strict=True)]
        return bytes(pa.schema(fields, metadata={_AS_JSON: b"1"}).serialize())


def output_names(columns: Sequence[str]) -> list[str]:
    """What kept columns are called in the output: `input_...` where a result column has the name.

    Raises:
        InvalidInputError: two would have the same name.
    """
    taken = set(result_schema(OPTIONAL_COLUMNS).names)
    names = [f"input_{column}" if column in taken else column for column in columns]
    if len(set(names)) != len(names):
        raise InvalidInputError(f"`keep_columns` gives two columns of the output the same name: {', '.join(names)}")
    return names


def kept_schema(schema: bytes) -> pa.Schema:
    """The columns that `KeptRows.schema` describes, none for b""."""
    if not schema:
        return pa.schema([])
    return pa.ipc.read_schema(pa.py_buffer(schema)).remove_metadata()


def column_types(schema: bytes) -> dict[str, str]:
    """What the columns that `KeptRows.schema` describes are called, and their types, to be read by people."""
    return {field.name: str(field.type) for field in kept_schema(schema)}


def typed(table: pa.Table, schema: bytes) -> pa.Table:
    """Kept columns as the output has them."""
    found = pa.ipc.read_schema(pa.py_buffer(schema))
    if not found.metadata or _AS_JSON not in found.metadata:
        return table.rename_columns(found.names).cast(found)
    arrays = [
        pa.array([_from_json(text, field.type) for text in column.to_pylist()], field.type)
        for column, field in zip(table.columns, found, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=found.remove_metadata())


def add_columns(results: pa.Table, kept: pa.Table | None, first_row: int, schema: bytes) -> pa.Table:
    """Results with the kept columns of their rows.

    Args:
        kept: those of a chunk's rows, typed; None for nulls, where the chunk can't be read.
        first_row: the chunk's.
        schema: of the kept columns; b"" adds nothing.
    """
    for number, field in enumerate(kept_schema(schema)):
        if kept is None:
            column = pa.nulls(results.num_rows, field.type)
        else:
            indices = pc.subtract(results["row_index"], first_row)
            column = kept.column(number).take(indices)
        results = results.append_column(field, column)
    return results


def columns_of(part: pa.Table, rows: range, schema: bytes) -> pa.Table | None:
    """The kept columns of a chunk's rows in its part; None where none are kept or a row is missing."""
    indices = pc.index_in(pa.array(rows, pa.int64()), value_set=part["row_index"])
    if not schema or indices.null_count:
        return None
    return part.select(kept_schema(schema).names).take(indices)


def hash_columns(digest: hashlib._Hash, table: pa.Table) -> None:
    """Add the values of kept columns to a hash; it doesn't depend on how Arrow lays them out."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        digest.update(repr((name, column.to_pylist())).encode(errors="surrogatepass"))


def encode_table(table: pa.Table | None) -> bytes:
    """Kept columns as bytes, for a chunk's payload."""
    if table is None:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode_table(encoded: bytes) -> pa.Table | None:
    """Undo `encode_table`."""
    return pa.ipc.open_stream(encoded).read_all() if encoded else None


def _runs(rows: Sequence[Any]) -> Iterable[pa.RecordBatch]:
    """Neighbouring rows of one batch as slices of it."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end][0] is not rows[start][0]:
            batch, first = rows[start]
            yield batch.slice(first, end - start)
            start = end


def _kinds(value: Any) -> Iterable[str]:
    """What a value of JSON is; of a list, what its items are, too."""
    if not isinstance(value, list):
        return (_kind(value),)
    return {_LIST, *(_LIST + _kind(item) for item in value if item is not None)}


def _cell_kinds(cell: str) -> Iterable[str]:
    """What a cell of CSV is; an empty one says nothing."""
    return (_kind(_cell_value(cell)),) if cell else ("nothing",)


def _cell_value(cell: str) -> Any:
    """The number or flag that a cell of CSV holds, None for an empty one, else its text."""
    if not cell or cell in _FLAGS:
        return _FLAGS.get(cell)
    number = _NUMBER.fullmatch(cell) if len(cell) <= _MAX_NUMBER_CHARS else None
    if number is None:
        return cell
    if number.lastindex == 1:
        return int(cell)
    value = float(cell)
    return value if math.isfinite(value) else cell


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _EXACT_IN_FLOAT64 else "wide int" if value in _INT64 else "json"
    if isinstance(value, float):
        return "float"
    return "text" if isinstance(value, str) else "json"


def _common_type(kinds: set[str]) -> pa.DataType:
    """What holds all values of a column; text, with JSON in it where they aren't texts, where nothing else does."""
    kinds = kinds - {"nothing"}
    if kinds == {"bool"}:
        return pa.bool_()
    if kinds and kinds <= {"int", "wide int"}:
        return pa.int64()
    if kinds and kinds <= {"int", "float"}:
        return pa.float64()
    if kinds and all(kind.startswith(_LIST) for kind in kinds):
        items = {kind.removeprefix(_LIST) for kind in kinds - {_LIST}}
        item = _common_type(items)
        if items <= {"text"} or not pa.types.is_string(item):
            return pa.list_(item)
    return pa.string()


def _from_json(text: str | None, kind: pa.DataType) -> Any:
    if text is None:
        return None
    value = json.loads(text)
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else text
    if isinstance(value, str):
        value = _cell_value(value)
    if pa.types.is_list(kind):
        return [_as_number(item, kind.value_type) for item in value]
    return _as_number(value, kind)


def _as_number(value: Any, kind: pa.DataType) -> Any:
    """A value, whole numbers as floats where the others aren't whole."""
    return float(value) if value is not None and pa.types.is_float64(kind) else value
