"""Decodes one line of JSONL strictly, and says what is wrong with a line that isn't one JSON object.

Stricter than Python's `json`: no repeated keys, no NaN, no lone surrogates. Knows nothing of what the fields mean.
Called by the row reader.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from minisgl_jobs.faults import FieldError, kind
from minisgl_jobs.sources import BOM, MAX_LINE_BYTES

EXAMPLE = '{"prompt": "..."}'
_ONE_OBJECT = f"each line must be one JSON object, such as {EXAMPLE}"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _RepeatedKeyError(ValueError):
    pass


class _ConstantError(ValueError):
    pass


class _RepeatedKey(dict[str, Any]):
    """Stands for an object with repeated keys when such a line is decoded once more to say where it is."""

    key = ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise _RepeatedKeyError
    return built


def _refuse_constant(name: str) -> float:
    raise _ConstantError(name)


def _mark_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) == len(pairs):
        return built
    marked = _RepeatedKey(built)
    keys = [key for key, _ in pairs]
    marked.key = next(key for key in keys if keys.count(key) > 1)
    return marked


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_marking_decoder = json.JSONDecoder(object_pairs_hook=_mark_repeated)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object on a line; surrounding blanks and a byte order mark don't matter.

    Raises:
        FieldError: the line isn't exactly one well-formed JSON object.
    """
    if len(line) > MAX_LINE_BYTES:
        raise FieldError("", f"is longer than {MAX_LINE_BYTES >> 20} MiB", "split or shorten the row")
    body = line.strip().removeprefix(BOM).lstrip()
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        bad = body[error.start]
        raise FieldError("", f"isn't UTF-8: byte {error.start + 1} is 0x{bad:02x}", "save the file as UTF-8") from None
    try:
        value, end = _decoder.raw_decode(text)
    except _ConstantError as error:
        field = _find(text, lambda v: isinstance(v, float) and not math.isfinite(v))
        raise FieldError(field, f"is {error}, which JSON doesn't have", "give a number, or null for none") from None
    except _RepeatedKeyError:
        field = _find(text, lambda v: isinstance(v, _RepeatedKey))
        raise FieldError(field, "stands twice in one object", "keep one of them") from None
    except json.JSONDecodeError as error:
        raise _syntax_fault(text, error) from None
    except ValueError:  # Python refuses to convert such numbers, whose cost is quadratic
        raise FieldError("", "holds a number of thousands of digits", "write it as a string") from None
    except RecursionError:
        raise nested_too_deeply("") from None
    if end != len(text):
        column = len(text) - len(text[end:].lstrip()) + 1
        raise FieldError("", f"goes on after its JSON value, at column {column}", _ONE_OBJECT)
    if type(value) is not dict:
        raise FieldError("", f"must be a JSON object, not {kind(value)}", _ONE_OBJECT)
    if "\\u" in text and _SURROGATE.search(text):
        _refuse_lone_surrogates(text, value)
    return value


def raw_text(line: bytes, *path: str) -> str:
    """The JSON text of the value at `path` as it stands in a line that `parse_object` took.

    The value isn't rebuilt from Python objects, so numbers keep every digit.
    """
    raw = msgspec.Raw(line.strip().removeprefix(BOM))
    try:
        for key in path:
            raw = _fields_decoder.decode(raw)[key]
    except RecursionError:
        raise nested_too_deeply(".".join(path)) from None
    return bytes(raw).decode()


def nested_too_deeply(field: str) -> FieldError:
    return FieldError(field, "is nested too deeply", "flatten it, or write it as a string")


def _syntax_fault(text: str, error: json.JSONDecodeError) -> FieldError:
    before, rest = text[: error.pos].rstrip(), text[error.pos :]
    if "\0" in text:
        hint = "it holds NUL bytes: is the file binary or UTF-16?"
    elif rest.startswith("'"):
        hint = "write names and strings in double quotes"
    elif rest.startswith(("True", "False", "None")):
        hint = "JSON writes true, false and null"
    elif rest.startswith(("}", "]", ",")) and (before.endswith(",") or rest.startswith(",")):
        hint = "remove the comma before the closing bracket"
    elif error.msg.startswith(("Invalid control character", "Unterminated string")):
        hint = "close the string; line breaks and tabs inside one are written \\n and \\t"
    else:
        hint = _ONE_OBJECT
    return FieldError("", f"isn't valid JSON: {error.msg} at column {error.pos + 1}", hint)


def _refuse_lone_surrogates(text: str, value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        field = _find(text, lambda v: isinstance(v, str) and not _is_encodable(v))
        raise FieldError(
            field,
            "holds half of a surrogate pair, which isn't a character",
            r"write the whole pair, such as \ud83d\ude00",
        ) from None
    except RecursionError:
        raise nested_too_deeply("") from None


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _find(text: str, is_bad: Callable[[Any], bool]) -> str:
    """The path of the first bad value (or bad key) in a line that decodes leniently, "" when it isn't found."""
    try:
        return _search(_marking_decoder.raw_decode(text)[0], "", is_bad) or ""
    except (RecursionError, ValueError):
        return ""


def _search(value: Any, path: str, is_bad: Callable[[Any], bool]) -> str | None:
    if isinstance(value, _RepeatedKey) and is_bad(value):
        return f"{path}.{value.key}" if path else value.key
    if is_bad(value):
        return path
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            child_path = f"{path}.{key}" if path else key
            if is_bad(key):
                return child_path
            children.append((child_path, child))
    elif isinstance(value, list):
        children = [(f"{path}[{i}]", child) for i, child in enumerate(value)]
    return next(
        (found for child_path, child in children if (found := _search(child, child_path, is_bad)) is not None), None
    )
