"""Reads rows: one line of JSONL or one row of a table in, one checked `Row` or one `Fault` out.

A line is decoded once and checked field by field. A field is never dropped silently: it is read, known to make no
difference, or refused with a hint. Knows nothing of files, Redis or models. Called by the client and the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from minisgl_batch.errors import Fault, InvalidInputError, InvalidParameterError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.words import is_unicode
from minisgl_jobs.custom_ids import CustomIdIndex
from minisgl_jobs.faults import MAX_SHOWN, FaultLog, FieldError, as_text, describe_fault, kind, show
from minisgl_jobs.fields import ENVELOPE_FIELDS, PARAM_FIELDS, PROMPT_FIELDS, ROW_FIELDS
from minisgl_jobs.inputs import Columns
from minisgl_jobs.jsonl import parse_object
from minisgl_jobs.kept import KeptRows
from minisgl_jobs.model import Row, RowError
from minisgl_jobs.openai_batch import is_envelope, open_envelope
from minisgl_jobs.prompts import check_messages, check_prompt, check_token_ids
from minisgl_jobs.records import Record
from minisgl_jobs.settings import (
    check_chat_options,
    read_custom_id,
    read_metadata,
    read_params,
    refuse_unknown,
    settings_beside_template,
)
from minisgl_jobs.sources import BOM
from minisgl_jobs.template import PromptTemplate

MAX_MODELS_NOTED = 8


class Located(Protocol):
    """Knows where the record that it gave last came from: a file's name, and a line or a table's row; see `Fault`."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def place(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How the rows of a job are read.

    Attributes:
        template: makes each prompt from the row's own fields, such as 'Translate: {text}'. A field that the template
            uses means nothing else; columns that it doesn't use are passed over.
        prompt_column, messages_column: the field that holds the prompts, or the chat messages, where it isn't called
            so; other columns are passed over.
        settings: whether, beside a template or such a column, fields called as sampling settings, `custom_id` and
            `metadata` mean that; in a dataset they may be data.
        keep_columns: fields that are copied to the output.
        system: the job's system message, which the worker puts before messages that have none.
        chat: make each prompt (also a template's) one user message, which the model's chat template renders; without
            it, prompts are completed as they are. Not given: on when there is a template or a system message.
        limit: read the first so many rows.
        max_faults: how many faults are listed, of all that are counted.
        on_error: "fail" gives a Fault for a row that can't be used, "record" a Row whose `error` says why.

    Raises:
        InvalidParameterError: the template isn't well-formed, `limit` is below 1, or options contradict each other.
    """

    template: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    settings: bool = True
    keep_columns: tuple[str, ...] = ()
    system: str | None = None
    chat: bool | None = None
    limit: int | None = None
    on_error: Literal["fail", "record"] = "fail"
    max_faults: int = MAX_SHOWN

    def __post_init__(self) -> None:
        for field in ("system", "template", "prompt_column", "messages_column", "keep_columns"):
            if not is_unicode("".join(getattr(self, field) or "")):
                raise InvalidParameterError(field, f"isn't valid Unicode: {getattr(self, field)!r}")
        if self.template is not None:
            PromptTemplate(self.template)
        given = [f"{name}_column" for name in ("prompt", "messages") if getattr(self, f"{name}_column") is not None]
        given += ["template"] if self.template is not None else []
        if len(given) > 1:
            raise InvalidParameterError(given[0], f"stands beside {given[1]}: give one of them")
        if not self.settings and not given:
            needed = "needs one of `prompt_column`, `messages_column` and `template` beside it"
            raise InvalidParameterError("settings=False", f"{needed}, such as `messages_column` messages")
        if "" in self.keep_columns or len(set(self.keep_columns)) != len(self.keep_columns):
            raise InvalidParameterError("keep_columns", "must be names of columns, each once")
        if self.on_error not in ("fail", "record"):
            raise InvalidParameterError("on_error", f"must be fail or record, got {self.on_error!r}")
        if self.limit is not None and self.limit < 1:
            raise InvalidParameterError("limit", f"must be at least 1, got {self.limit}")
        if self.system == "":
            raise InvalidParameterError("system", "is empty: give the system message, or leave it out")
        if self.system is not None and self.chat is False:
            raise InvalidParameterError("system", "needs chat messages: leave out `chat=False`, or `system`")

    @property
    def columns(self) -> Columns:
        """Which columns of a table are to be read."""
        if self.template is not None:
            wanted = dict.fromkeys(sorted(PromptTemplate(self.template).names), "`template`")
        else:
            given = {self.prompt_column: "`prompt_column`", self.messages_column: "`messages_column`"}
            wanted = {column: option for column, option in given.items() if column is not None}
        return Columns(wanted, self.keep_columns, settings=self.settings)

    @property
    def makes_chat(self) -> bool:
        if self.chat is not None:
            return self.chat
        return self.template is not None or self.system is not None


class RowReader:
    """Reads the rows of one input.

    Attributes:
        file: the input's name in faults.
        num_rows: rows read so far, faulty ones included; blank lines aren't rows.
        faults: what was wrong so far.
        kept: the columns that are copied to the output.
        models: models that OpenAI lines name, the first few; a job runs on its own model whatever they say.
    """

    def __init__(
        self,
        file: str,
        options: ReadOptions | None = None,
        *,
        defaults: SamplingParams | None = None,
        first_row: int = 0,
        is_whole: bool = True,
    ) -> None:
        """
        Args:
            defaults: the job's parameters, which those of rows must suit; by default they aren't looked at.
            first_row: the index of the first row that is read.
            is_whole: whether rows are compared with earlier ones; not for a part of an input, which was checked whole.
        """
        self.file = file
        self.num_rows = first_row
        self.models: list[str] = []
        self._options = options or ReadOptions()
        self._defaults = defaults
        self.faults = FaultLog(self._options.max_faults)
        self._template = PromptTemplate(self._options.template) if self._options.template is not None else None
        prompt, messages = self._options.prompt_column, self._options.messages_column
        column = prompt or messages
        self._column = None if column is None else (column, "prompt" if messages is None else "messages")
        self._is_bare = not self._options.settings
        self._prompt_fields = list(self._options.columns.wanted)
        meant = PARAM_FIELDS if self._prompt_fields else ROW_FIELDS
        self._data = frozenset(self._options.keep_columns).difference(meant, self._prompt_fields)
        self._makes_chat = self._options.makes_chat
        self._is_whole = is_whole
        self._custom_ids = CustomIdIndex()
        self._url: tuple[str, str] | None = None  # the first OpenAI line's, and where it stands
        self.kept = KeptRows(self._options.keep_columns)

    def read(self, records: Iterable[Record], at: Located | None = None) -> Iterator[Row | Fault]:
        """One Row or Fault for each line that isn't blank, in order; nothing about a line raises.

        A row's index counts the lines that aren't blank; a fault's line counts them all.

        Args:
            at: knows where the last record came from; by default all are lines of `file`.
        """
        for number, record in enumerate(records, 1):
            if isinstance(record, bytes):
                stripped = record.strip()
                if not stripped or stripped == BOM:
                    continue
            where = (at.file, at.line, at.place) if at is not None else (self.file, number, "")
            yield self._read_record(record, *where)
            if self.num_rows == self._options.limit:
                return

    def rows(self, records: Iterable[Record], at: Located | None = None) -> Iterator[Row]:
        """The rows of an input that has no faults, or whose faulty rows are recorded.

        Rows come until the first fault; reading goes on to find the others. Rows that came before the error must not
        be run.

        Raises:
            InvalidInputError: there were faults, which it lists, or no rows at all.
        """
        refused = False
        for item in self.read(records, at):
            if isinstance(item, Fault):
                refused = True
            elif not refused:
                yield item
        if refused:
            raise self.faults.error(self.file, self.num_rows)
        if not self.num_rows:
            raise InvalidInputError(f"{self.file} holds no rows")

    def _read_record(self, record: Record, file: str, number: int, place: str) -> Row | Fault:
        row_index = self.num_rows
        self.num_rows += 1
        fields: dict[str, Any] = {}
        try:
            if isinstance(record, bytes):
                fields = parse_object(record)
            elif record.problem is not None:
                raise record.problem
            else:
                fields = record.values
            return self._checked_row(row_index, number, place, self._without_data(fields), record)
        except FieldError as found:
            fault = found.at(file, number, place)
        finally:
            if self._options.keep_columns:
                self.kept.add(record, fields)
        self.faults.add(fault)
        if self._options.on_error == "fail":
            return fault
        return Row(
            row_index=row_index,
            custom_id="" if self._is_bare else _readable(lambda: read_custom_id(fields)),
            metadata="" if self._is_bare else _readable(lambda: self._metadata(fields, record)),
            error=RowError("invalid_request", describe_fault(fault)),
        )

    def _without_data(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that mean something, or are to be refused: without those that are only copied."""
        if self._is_bare:
            return {name: fields[name] for name in self._prompt_fields if name in fields}
        data = self._data - ENVELOPE_FIELDS if "body" in fields else self._data
        return {name: value for name, value in fields.items() if name not in data} if data else fields

    def _checked_row(self, row_index: int, number: int, place: str, fields: dict[str, Any], record: Record) -> Row:
        custom_id = read_custom_id(fields)
        if self._is_whole and custom_id and (first := self._custom_ids.add(custom_id, number)) is not None:
            already = f"stands on line {first} already" if not place else "is an earlier row's already"
            raise FieldError("custom_id", f"{show(custom_id)} {already}", "give each row its own")
        prefix = ""
        if self._template is not None:
            body = _use_template(self._template, fields)
        elif self._column is not None:
            body = _use_column(*self._column, fields)
        elif is_envelope(fields):
            body, prefix = open_envelope(fields), "body."
            self._check_url(fields["url"], place or f"line {number}")
        else:
            body = fields
            refuse_unknown(body, prefix)
        self._note_model(body.get("model"), prefix)
        prompt, messages, token_ids = self._read_ask(body, prefix)
        params = read_params(body, prefix, self._defaults)
        if self._defaults is not None:
            check_chat_options(params, self._defaults, messages, prefix)
        return Row(
            row_index=row_index,
            custom_id=custom_id,
            prompt=prompt,
            messages=messages,
            prompt_token_ids=token_ids,
            params=params,
            metadata=self._metadata(fields, record),
        )

    def _check_url(self, url: str, where: str) -> None:
        """A batch is answered in one shape."""
        self._url = self._url or (url, where)
        if self._is_whole and url != self._url[0]:
            raise FieldError("url", f"isn't that of {self._url[1]}, {self._url[0]}", "make a file for each url")

    def _read_ask(
        self, body: dict[str, Any], prefix: str
    ) -> tuple[str | None, list[dict[str, Any]] | None, list[int] | None]:
        """(prompt, messages, token ids), of which one is given."""
        given = [field for field in PROMPT_FIELDS if body.get(field) is not None]
        if not given:
            problem = "is null" if "prompt" in body else "is missing"
            raise FieldError(f"{prefix}prompt", problem, f"give one of {', '.join(PROMPT_FIELDS)}")
        if len(given) > 1:
            raise FieldError(prefix + given[1], f"stands beside {prefix}{given[0]}", "keep one of them")
        path, value = prefix + given[0], body[given[0]]
        if given[0] == "messages":
            return None, check_messages(value, path), None
        if given[0] == "prompt_token_ids":
            if self._options.system is not None:
                raise FieldError(path, "can't take the job's system message", "give messages, or leave out `system`")
            return None, None, check_token_ids(value, path)
        prompt = check_prompt(value, path)
        return (None, [{"role": "user", "content": prompt}], None) if self._makes_chat else (prompt, None, None)

    def _metadata(self, fields: dict[str, Any], record: Record) -> str:
        """The row's metadata, or that of an OpenAI line's body."""
        if not isinstance(record, bytes):
            return read_metadata(fields, None)
        line, body = record, fields.get("body")
        if self._template is None and isinstance(body, dict) and fields.get("metadata") is None:
            return read_metadata(body, line, "body")
        return read_metadata(fields, line)

    def _note_model(self, model: Any, prefix: str) -> None:
        if model is None or model in self.models:
            return
        if not isinstance(model, str):
            raise FieldError(f"{prefix}model", f"must be a string, not {kind(model)}", as_text(model))
        if len(self.models) < MAX_MODELS_NOTED:
            self.models.append(model)


def read_rows(
    records: Iterable[Record], options: ReadOptions | None = None, *, file: str = "rows"
) -> Iterator[Row | Fault]:
    """`RowReader.read` for callers that need nothing else of the reader."""
    return RowReader(file, options).read(records)


def _use_template(template: PromptTemplate, fields: dict[str, Any]) -> dict[str, Any]:
    """The row that the template makes of a row's columns: its prompt and its sampling settings."""
    prompt = template.fill(fields)
    columns = {field: value for field, value in fields.items() if field not in template.names}
    return {**settings_beside_template(columns), "prompt": prompt}


def _use_column(column: str, field: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The row that a column with another name makes: its prompt or messages, and its sampling settings."""
    value = fields.get(column)
    if value is None:
        problem = "is null" if column in fields else "is missing"
        raise FieldError(column, problem, f"give the {field}, or name another column")
    others = {name: value for name, value in fields.items() if name != column and name not in PROMPT_FIELDS}
    return {**settings_beside_template(others), field: value}


def _readable(read: Callable[[], str]) -> str:
    """What a faulty row still tells, "" where that is what is wrong with it."""
    try:
        return read()
    except FieldError:
        return ""
