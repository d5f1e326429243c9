"""Amounts, durations and texts of users as people read them: on one line, and harmless to a terminal.

Knows nothing of jobs or terminals. Called by everything that shows something.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, lone surrogates, line separators and direction overrides."""


def one_line(text: str, max_chars: int | None = None) -> str:
    """Text of a user or a model as one harmless line: control characters are shown as escapes, such as `\\n`."""
    text = UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
    return text if max_chars is None or len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def harmless(text: str) -> str:
    """The same with lines and tabs as they are."""
    return UNSAFE.sub(lambda match: match[0] if match[0] in "\n\t" else one_line(match[0]), text)


def is_unicode(text: str) -> bool:
    """Whether it can be stored and sent; what a user typed in another encoding can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a plain table, the first with the columns' names; cells are never cut."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    lines = [columns, *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def duration(seconds: float) -> str:
    """Such as `4.2 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def size(num_bytes: int) -> str:
    """Such as `462 bytes`, `12 KiB`, `1.4 GiB`."""
    if num_bytes < 1024:
        return count(num_bytes, "byte")
    amount, units = num_bytes / 1024, iter(("KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1000 and (larger := next(units, "")):
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"


def count(number: int, noun: str) -> str:
    """Such as `1 row` and `1,200 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
