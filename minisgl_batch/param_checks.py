"""Checks of values that users give, by kind; errors name the field. Called by the records that hold them."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.words import is_unicode


def whole(value: Any) -> Any:
    """A float that is a whole number, as a column of numbers with gaps has it, as one; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_int(field: str, value: object, low: int, high: int) -> None:
    """Raise InvalidParameterError unless it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameterError(field, f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise InvalidParameterError(field, f"must be between {low} and {high}, got {value}")


def check_float(field: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Raise InvalidParameterError unless it is a number from `low`, or above it, to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameterError(field, f"must be a number, got {value!r}")
    if not low <= value <= high or (low_open and value == low):  # also refuses NaN
        opening = "(" if low_open else "["
        raise InvalidParameterError(field, f"must be in {opening}{low:g}, {high:g}], got {value}")


def check_bool(field: str, value: object) -> None:
    """Raise InvalidParameterError unless it is a flag, or not given."""
    if value is not None and not isinstance(value, bool):
        raise InvalidParameterError(field, f"must be true or false, got {value!r}")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidParameterError unless it is one of these, or not given."""
    if value is not None and value not in choices:
        raise InvalidParameterError(field, f"must be one of {', '.join(choices)}, got {value!r}")


def check_strings(field: str, value: object, most: int) -> None:
    """Raise InvalidParameterError unless it is a text or at most so many, or not given."""
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise InvalidParameterError(field, f"must be a string or a list of strings, got {value!r}")
    if len(strings) > most:
        raise InvalidParameterError(field, f"at most {most} strings, got {len(strings)}")
    if not all(strings):
        raise InvalidParameterError(field, "must not hold an empty string")
    for string in strings:
        if not is_unicode(string):
            raise InvalidParameterError(field, f"isn't valid Unicode: {string!r}")


def check_json(field: str, value: object) -> None:
    """Make sure that the value is the same after it has travelled as JSON or MessagePack."""
    try:
        msgspec.msgpack.encode(value)
        is_kept = msgspec.json.decode(msgspec.json.encode(value)) == value
    except RecursionError:
        raise InvalidParameterError(field, "is nested too deeply") from None
    except (TypeError, ValueError, OverflowError):
        is_kept = False
    if not is_kept:
        raise InvalidParameterError(field, "must hold nothing but what JSON has, and no number of more than 64 bits")
