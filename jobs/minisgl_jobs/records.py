"""What files of every format give to the row reader: a line of JSON, or the values of a table's row.

Knows nothing of files. Called by the readers of the formats; `rows.py` makes rows of records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from minisgl_batch.errors import InvalidInputError
from minisgl_batch.other_fields import nearest
from minisgl_jobs.faults import FieldError
from minisgl_jobs.fields import PARAM_FIELDS, PROMPT_COLUMNS, PROMPT_FIELDS, ROW_FIELDS
from minisgl_jobs.model import InputInfo

_TEXTS = {"custom_id", "model", "prompt"}
_STRINGS = {"stop", "bad_words"}  # one, or a list in JSON
_JSON_TEXTS = {
    "chat_template_kwargs",
    "choices",
    "logit_bias",
    "messages",
    "prompt_token_ids",
    "response_format",
    "structured_outputs",
    "tools",
}
_MAX_COLUMNS_NAMED = 12


class TableRow(NamedTuple):
    """A row of a table.

    Attributes:
        values: of the columns that make the row; null columns are left out.
        problem: why it can't be used.
        cells: those that are copied to the output, where the table has no types.
        kept: the columns that are copied to the output, of all rows that were read with this one, where it has.
        number: which of these rows this is.
    """

    values: dict[str, Any]
    problem: FieldError | None = None
    cells: tuple[str, ...] = ()
    kept: pa.RecordBatch | None = None
    number: int = 0


Record: TypeAlias = bytes | TableRow


class RecordFile(Protocol):
    """An open file of any format: iterate over its records, from where it stands.

    Attributes:
        position: of the next record, in bytes or rows; a file that is opened again can `skip_to` it.
        line: where the last record begins, from 1; of tables, the row's number.
        lines_read: up to `position`.
    """

    position: int
    line: int

    @property
    def lines_read(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def skip_to(self, position: int, lines_read: int) -> None: ...
    def info(self) -> InputInfo: ...
    def close(self) -> None: ...


def check_columns(
    name: str, columns: Collection[str], wanted: Mapping[str, str], keep: Collection[str], *, settings: bool = True
) -> None:
    """Make sure that a table can be used before any of its rows is looked at.

    Args:
        name: the file's.
        columns: those it has.
        wanted: column that makes the prompts -> the option that names it; without any, one must be called as a row's
            field.
        keep: columns that are copied to the output.
        settings: whether columns mean something by their names.

    Raises:
        InvalidInputError: a column is missing, or is called almost as a setting.
    """
    shown = ", ".join(list(columns)[:_MAX_COLUMNS_NAMED]) + (", ..." if len(columns) > _MAX_COLUMNS_NAMED else "")
    for column, option in {**dict.fromkeys(keep, "`keep_columns`"), **wanted}.items():
        if column not in columns:
            near = nearest(column, frozenset(columns), cutoff=0.7)
            hint = f"; did you mean {near}?" if near else ""
            raise InvalidInputError(f"{name} has no column {column!r}, which {option} names; it has {shown}{hint}")
    if not wanted and not any(field in columns for field in PROMPT_FIELDS):
        likely = [(column, near) for column in columns if (near := nearest(column, frozenset(PROMPT_COLUMNS)))]
        hint = "".join(f"; did you mean {PROMPT_COLUMNS[near]} {column}?" for column, near in likely[:1])
        raise InvalidInputError(
            f"{name} has none of the columns {', '.join(PROMPT_FIELDS)}; it has {shown}: name one with "
            f"`prompt_column` or `messages_column`, or make prompts with `template`{hint}"
        )
    for column in columns if settings else ():
        if column in ROW_FIELDS or column in wanted or column in keep:
            continue
        if near := nearest(column, PARAM_FIELDS, cutoff=0.9):
            raise InvalidInputError(
                f"{name}: column {column!r} isn't a known field; did you mean {near}? Otherwise rename it, or copy it "
                f"to the output: `keep_columns` {column}"
            )


def settings_columns(columns: Collection[str], wanted: Collection[str]) -> list[str]:
    """The columns that mean something by their name, beside those that make the prompts by an option."""
    taken = {*wanted, *PROMPT_FIELDS} if wanted else set()
    return [column for column in columns if column in ROW_FIELDS and column not in taken]


def field_of(column: str, wanted: Mapping[str, str]) -> str:
    """The field that a column is read as: the one whose option names it, else the one that is called so."""
    option = wanted.get(column)
    return next((field for field, known in PROMPT_COLUMNS.items() if known == option), column)


def tidy(field: str, value: Any, *, is_text: bool) -> Any:
    """A cell of this field's column as the row reader takes it; None for one that holds nothing.

    Tables have no optional fields, so null, NaN and, in CSV, the empty text are "not given"; what isn't text in CSV is
    written as JSON.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        if field in _JSON_TEXTS or field in _STRINGS or (field in PARAM_FIELDS and is_text):
            return _parsed(field, value)
        if field in ("metadata", "sampling_params"):
            return _parsed(field, value) if value else None
        return None if is_text and not value and field in ROW_FIELDS and field != "prompt" else value
    if field in _TEXTS and isinstance(value, int):
        return str(value)
    return without_nulls(value)


def without_nulls(value: Any) -> Any:
    """A nested value without the fields that Arrow adds to structs that lack them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(column: str, text: str) -> Any:
    """JSON where a text holds it; the text itself is then refused with the field's own message."""
    if not text:
        return None
    if column in _STRINGS and not text.startswith("["):
        return text
    if text in ("True", "False"):  # as Python writes them
        return text == "True"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
