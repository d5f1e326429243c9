"""Times and durations as options: `2026-12-01T08:00`, `08:00`, `2h`, `90m`."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import click

MAX_DURATION_S = 10 * 366 * 86400.0
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) *(s|m|min|h|d|w)")


def parse_duration(text: str) -> float:
    """The seconds of a number with a unit, such as 30s, 90m, 2h, 7d.

    Raises:
        click.BadParameter: it is none.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= seconds <= MAX_DURATION_S:
        raise click.BadParameter(f"{text!r} is not a duration of up to ten years: write such as 30s, 90m, 2h or 7d")
    return seconds


def parse_moment(text: str) -> datetime:
    """A date and time, the next time of day, or a duration from now (also after a +), as a datetime with its zone.

    Without a zone it is ours.

    Raises:
        click.BadParameter: it is none.
    """
    stripped = text.strip()
    if stripped.startswith("+") or _DURATION.fullmatch(stripped):
        return datetime.now().astimezone() + timedelta(seconds=parse_duration(stripped.removeprefix("+")))
    try:
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}", stripped):
            hour, minute = stripped.split(":")
            return _next(int(hour), int(minute))
        return datetime.fromisoformat(re.sub("[zZ]$", "+00:00", stripped)).astimezone()
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(f"{text!r} is not a time: write such as 2026-12-01T08:00, 08:00 or 2h") from None


def _next(hour: int, minute: int) -> datetime:
    """When clocks here show this time next."""
    now = datetime.now()
    at = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (at if at > now else at + timedelta(days=1)).astimezone()
