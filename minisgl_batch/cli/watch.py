"""A view that is drawn anew again and again: in place on a terminal, one after the other elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from minisgl_batch.cli.console import stdout_console, talk
from minisgl_batch.errors import RedisUnavailableError
from minisgl_jobs.reader import OUTAGE_S

Look = TypeVar("Look")


def watch(
    look: Callable[[], Look],
    draw: Callable[[Look], RenderableType],
    write: Callable[[Look], None],
    *,
    interval_s: float,
    is_over: Callable[[Look], bool] = lambda _: False,
) -> Look:
    """Look every `interval_s` until it is over; answers the last look.

    Args:
        look: what there is to see now. A Redis that is away for less than OUTAGE_S is put up with.
        draw: it, on a terminal.
        write: print it, where there is no terminal.
    """
    live = None
    if sys.stdout.isatty():
        live = Live(console=stdout_console(), auto_refresh=False, vertical_overflow="crop")
        live.start()
    seen: Look | None = None
    away_since: float | None = None
    try:
        while True:
            try:
                seen = look()
                away_since = None
            except RedisUnavailableError as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > OUTAGE_S or seen is None:
                    raise
                if live is None:
                    talk(str(error))
                else:
                    live.update(Group(draw(seen), Text(str(error), style="bold red")), refresh=True)
            else:
                if live is None:
                    write(seen)
                else:
                    live.update(draw(seen), refresh=True)
                if is_over(seen):
                    return seen
            time.sleep(interval_s)
    finally:
        if live is not None:
            live.stop()


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A plain table for `draw`; its cells are text, never markup."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(Text(column), no_wrap=True)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made
