"""How the command line talks: data on standard output, all else on standard error, plain where it isn't a terminal.

Text of users and models is never printed raw to a terminal, and tables never cut a cell. Knows nothing of jobs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from minisgl_batch.errors import Fault, InvalidInputError, MiniSGLError
from minisgl_batch.words import harmless, text_table

if TYPE_CHECKING:
    from rich.console import Console


INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
PIPE_CLOSED = 141
"""The exit code when nobody reads the output any more, as of commands that SIGPIPE ends."""


def talk(message: str) -> None:
    """Tell the user something that isn't data."""
    click.echo(harmless(message), err=True)


def drop_output() -> None:
    """Give up what wasn't taken of the output, which the interpreter would try to write once more when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())
    os.close(null)


def show_error(error: MiniSGLError) -> None:
    """Say what went wrong; faults of an input as a table."""
    if isinstance(error, InvalidInputError) and error.faults:
        talk(f"Error: {spelled(str(error).splitlines()[0])}")
        show_faults(error.faults, error.num_faults)
    else:
        talk(f"Error: {spelled(str(error))}")


def spelled(message: str) -> str:
    """A message with options as the user writes them here: it has the names that arguments have in programs."""
    options = command_options()
    return re.sub(r"`(\w+)(=False)?`", lambda found: options.get(found[1] + (found[2] or ""), found[0]), message)


def command_options() -> dict[str, str]:
    """Name of an argument -> option of the command that runs; also of `name=False`, where that has one."""
    context = click.get_current_context(silent=True)
    command = None if context is None else context.command
    if isinstance(command, click.Group):
        assert context is not None
        command = command.get_command(context, context.invoked_subcommand or "")
    options = {}
    for param in command.params if command is not None else ():
        options[str(param.name)] = max(param.opts, key=len)
        options |= {f"{param.name}=False": option for option in param.secondary_opts}
    return options


def show_faults(faults: Sequence[Fault], num_faults: int) -> None:
    """The first faults of an input as a table; on a terminal as one that fits it."""
    from minisgl_jobs.faults import COLUMNS, render_faults

    if not sys.stderr.isatty():
        talk(spelled(render_faults(faults, len(faults))))
        show_num_left_out(faults, num_faults)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS)
    table.columns[0].justify = "right"
    for column in table.columns[:2]:
        column.no_wrap = True
    for fault in faults:
        cells = (fault.place or str(fault.line), fault.field or "-", fault.problem, spelled(fault.hint))
        table.add_row(*map(Text, cells))
    stderr_console().print(table)
    show_num_left_out(faults, num_faults)


def show_num_left_out(shown: Sequence[object], number: int) -> None:
    """Below a list of faults, how many there are beside those."""
    if number > len(shown):
        talk(f"... and {number - len(shown):,} more; --max-faults lists them")


def talk_of_warnings() -> None:
    """Show what our own modules log, from warnings on."""
    root = logging.getLogger()
    if not any(isinstance(handler, _TalkHandler) for handler in root.handlers):
        root.addHandler(_TalkHandler(logging.WARNING))


def print_json(record: Any) -> None:
    """A line of JSON on standard output, for scripts."""
    click.echo(json.dumps(record))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output, a row a line; too long ones are left to the terminal to wrap."""
    for number, line in enumerate(text_table(columns, rows)):
        print_line(line, style="" if number else "bold")


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Names and values on standard output, one a line; empty values are left out."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        if value:
            print_line(f"{name.ljust(width)}  {value}", bold_chars=width)


def print_line(text: str, *, style: str = "", bold_chars: int = 0) -> None:
    """One line on standard output, whatever its length."""
    text = harmless(text)
    if not sys.stdout.isatty():
        click.echo(text)
        return
    from rich.text import Text

    line = Text(text, style=style)
    line.stylize("bold", 0, bold_chars)
    stdout_console().print(line, soft_wrap=True)


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def stdout_console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)


class _TalkHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        talk(f"{record.levelname.lower()}: {record.getMessage()}")
