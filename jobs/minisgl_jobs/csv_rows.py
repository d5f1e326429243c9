"""Reads CSV and TSV files record by record; a record may go over several lines. Called by `inputs.py`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minisgl_batch.errors import InvalidInputError
from minisgl_jobs.faults import FieldError
from minisgl_jobs.model import InputInfo
from minisgl_jobs.records import TableRow, check_columns, field_of, settings_columns, tidy
from minisgl_jobs.sources import MAX_LINE_BYTES, Input, csv_separator

_SEPARATORS = ",;\t|"


class CsvFile:
    """One file as a `RecordFile`. Its first line names the columns; its positions are bytes.

    Raises:
        InvalidInputError: it has no header, or lacks a column.
    """

    def __init__(self, lines: Input, *, wanted: Mapping[str, str], keep: Sequence[str], settings: bool = True) -> None:
        """Arguments as `TableFile`."""
        csv.field_size_limit(MAX_LINE_BYTES)  # of this process; the default of 128 KiB refuses long documents
        self.line = 0
        self._lines = lines
        self._num_lines = 0
        self._text = self._decoded()
        self._records = csv.reader(self._text, delimiter=_separator(lines.head()), strict=True)
        self._columns = self._header()
        check_columns(lines.name, self._columns, wanted, keep, settings=settings)
        used = [*wanted, *(settings_columns(self._columns, wanted) if settings else ())]
        self._used = {column: field_of(column, wanted) for column in used}
        self._keep = keep
        self.position = lines.position

    def __iter__(self) -> Iterator[TableRow]:
        while True:
            self.line = self._num_lines + 1
            try:
                cells = next(self._records)
                record = self._record(cells)
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"isn't CSV: {error}{self._lines_taken()}"
                record = TableRow({}, FieldError("", problem, "close the quotes, and double those inside a cell"))
            except UnicodeDecodeError:
                record = TableRow({}, FieldError("", f"isn't UTF-8{self._lines_taken()}", "save the file as UTF-8"))
                self._text = self._decoded()
                self._records = csv.reader(self._text, self._records.dialect)
            self.position = self._lines.position
            if record is not None:
                yield record

    @property
    def lines_read(self) -> int:
        return self._num_lines

    def skip_to(self, position: int, lines_read: int) -> None:
        """Go on with the record that begins at byte `position`."""
        self._lines.skip_to(position)
        self.position, self._num_lines = position, lines_read

    def info(self) -> InputInfo:
        return self._lines.info()

    def close(self) -> None:
        self._lines.close()

    def _record(self, cells: list[str]) -> TableRow | None:
        """None for a blank line."""
        if not cells:
            return None
        if len(cells) != len(self._columns):
            problem = f"has {len(cells)} cells, and the header names {len(self._columns)} columns{self._lines_taken()}"
            return TableRow({}, FieldError("", problem, "quote cells that hold separators or line breaks"))
        row = dict(zip(self._columns, cells, strict=True))
        values = {name: tidy(field, row[name], is_text=True) for name, field in self._used.items()}
        given = {name: value for name, value in values.items() if value is not None}
        return TableRow(given, cells=tuple(row[name] for name in self._keep))

    def _lines_taken(self) -> str:
        """Which lines are lost with a record that can't be used, where an open quote has taken more than its own."""
        return f" (in lines {self.line} to {self._num_lines}, read as one row)" if self._num_lines > self.line else ""

    def _header(self) -> list[str]:
        try:
            columns = next(self._records, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidInputError(f"{self._lines.name} isn't CSV in UTF-8: {error}") from None
        if columns and "" in columns:
            raise InvalidInputError(f"{self._lines.name}: {_unnamed_column(columns)}")
        if not columns or len(set(columns)) != len(columns):
            raise InvalidInputError(
                f"{self._lines.name} must begin with a line that names its columns, each once; it begins with {columns}"
            )
        return columns

    def _decoded(self) -> Iterator[str]:
        for line in self._lines:
            self._num_lines += 1
            yield line.decode("utf-8-sig" if self._num_lines == 1 else "utf-8")


def _unnamed_column(columns: list[str]) -> str:
    """What to do about the first column without a name."""
    number = columns.index("") + 1
    if number == 1 and len(columns) > 1:
        hint = (
            "pandas writes its index so: to_csv(..., index=False) leaves it out; or name the column in the first line"
        )
    else:
        hint = "name it in the first line, or take the separator away there and in the rows"
    return f"column {number} has no name: {hint}"


def _separator(head: bytes) -> str:
    """What the header is separated by."""
    first: Any = head.partition(b"\n")[0].decode(errors="replace")
    return csv_separator(head) or max(_SEPARATORS, key=first.count)
