"""Collects what is wrong in an input and shows it as a table.

Knows nothing of how rows are read. Called by the row reader; the command line renders the same faults in colour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from minisgl_batch.errors import Fault, InvalidInputError
from minisgl_batch.words import UNSAFE

MAX_SHOWN = 20
COLUMNS = ("line", "field", "problem", "what to do")

_OPTION = re.compile(r"`(\w+)(=False)?`")
_MAX_CELL_CHARS = 240
_MAX_VALUE_CHARS = 40


class FieldError(Exception):
    """What a check of one row found; the row reader turns it into a Fault, so it never leaves this package."""

    def __init__(self, field: str, problem: str, hint: str) -> None:
        super().__init__(field, problem, hint)
        self.field = field
        self.problem = problem
        self.hint = hint

    def at(self, file: str, line: int, place: str = "") -> Fault:
        """The fault, fit to be printed: user data must not reach a terminal raw, nor fill it."""
        field, problem, hint = (_printable(text) for text in (self.field, self.problem, self.hint))
        return Fault(file, line, field, problem, hint, place)


class FaultLog:
    """The first faults of an input, and how many there are."""

    def __init__(self, max_shown: int = MAX_SHOWN) -> None:
        self.first: list[Fault] = []
        self.num_faults = 0
        self._max_shown = max_shown

    def add(self, fault: Fault) -> None:
        self.num_faults += 1
        if len(self.first) < self._max_shown:
            self.first.append(fault)

    def error(self, file: str, num_rows: int) -> InvalidInputError:
        """The error that refuses an input of `num_rows` rows."""
        summary = f"{file}: {self.num_faults} of {num_rows} rows can't be used"
        return InvalidInputError(
            f"{summary}\n{render_faults(self.first, self.num_faults)}", self.first, self.num_faults
        )


def render_faults(faults: Sequence[Fault], num_faults: int) -> str:
    """A plain-text table of `faults`, with a last line for those of `num_faults` that aren't among them."""
    lines = [
        COLUMNS,
        *((fault.place or str(fault.line), fault.field or "-", fault.problem, fault.hint) for fault in faults),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    table = [
        f"{line:>{widths[0]}}  {field:<{widths[1]}}  {problem:<{widths[2]}}  {hint}"
        for line, field, problem, hint in lines
    ]
    if num_faults > len(faults):
        table.append(f"... and {num_faults - len(faults):,} more")
    return "\n".join(table)


def describe_fault(fault: Fault) -> str:
    """A fault as one sentence without the file's name, for the message of an error row.

    It names options as programs do and as the command line does: rows are the same whoever submits them.
    """
    field = f"{fault.field} " if fault.field else ""
    return f"{fault.place or f'line {fault.line}'}: {field}{fault.problem} ({_OPTION.sub(_both_names, fault.hint)})"


def show(value: Any) -> str:
    """A JSON value as text short enough for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def as_text(value: Any) -> str:
    """What to do about a value that must be a string."""
    return f'write it in quotes: "{show(value)}"' if isinstance(value, bool | int | float) else "give a text"


def _both_names(option: re.Match[str]) -> str:
    name, is_off = option[1], option[2] or ""
    return f"{name}{is_off}/{'--no-' if is_off else '--'}{name.replace('_', '-')}"


def _printable(text: str) -> str:
    if len(text) > _MAX_CELL_CHARS:
        text = f"{text[:_MAX_CELL_CHARS]}..."
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
