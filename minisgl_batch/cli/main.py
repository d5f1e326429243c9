"""The `minisgl-batch` command: its subcommands, each loaded when it is used, and how errors become exit codes."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from minisgl_batch._version import __version__
from minisgl_batch.cli.console import (
    INTERRUPTED,
    PIPE_CLOSED,
    command_options,
    drop_output,
    show_error,
    spelled,
    talk,
    talk_of_warnings,
)
from minisgl_batch.errors import InvalidParameterError, MiniSGLError
from minisgl_batch.other_fields import nearest

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# name -> what its help says first; the module of the same name under minisgl_batch.cli is imported on use.
COMMANDS = {
    "run": "Turn a file of prompts into a dataset, all in one.",
    "worker": "Serve a model: run jobs until stopped.",
    "submit": "Check a file of prompts and queue it as a job.",
    "status": "Show how far a job is, or all jobs and workers.",
    "tail": "Show a job's texts as they are generated.",
    "results": "Write a job's results as JSONL, OpenAI batch output, CSV or Parquet.",
    "cancel": "Stop a job; finished rows stay.",
    "retry": "Generate the failed rows of a job again.",
    "purge": "Forget jobs that have ended.",
    "pause": "Hand out nothing more of a model's jobs.",
    "resume": "End a pause: hand out a model's jobs again.",
    "jobs": "List jobs, newest first.",
    "workers": "List living workers.",
    "bench": "Measure the engine alone on standard workloads.",
}
EXIT_CODES = """\b
Exit codes:
  0    all went well: every row succeeded
  1    some rows or the job failed, or something went wrong on the way
  2    bad usage: an option, or rows of the input, can't be used
  3    there is no such job (any more)
  4    Redis can't be reached, refuses the login, or is full
  5    the job was written by another release
  130  interrupted
  141  nobody reads the output any more, as after `| head`
"""


def _options_of(command: click.Command | None) -> list[str]:
    """The long names of a command's options."""
    names = (name for param in command.params for name in (*param.opts, *param.secondary_opts)) if command else ()
    return [name for name in names if name.startswith("--")]


@contextmanager
def _usage_errors_in_one_line() -> Iterator[None]:
    """click would put the command's usage and a hint before them."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        talk(f"Error: {error.format_message()}")
        raise click.exceptions.Exit(error.exit_code) from error


@contextmanager
def _quiet_when_nobody_reads() -> Iterator[None]:
    """A reader may go when it has what it wants, as `head` does; click would make that an exit code of 1."""
    try:
        yield
    except BrokenPipeError as error:
        drop_output()
        raise click.exceptions.Exit(PIPE_CLOSED) from error


class LazyGroup(click.Group):
    """Knows its commands by name, so that `--help` and completion import none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"minisgl_batch.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _quiet_when_nobody_reads(), _usage_errors_in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _quiet_when_nobody_reads():
            try:
                with _usage_errors_in_one_line():
                    return self._invoke(ctx)
            except MiniSGLError as error:
                show_error(error)
                raise click.exceptions.Exit(error.exit_code) from error
            except KeyboardInterrupt as error:
                talk("interrupted")
                raise click.exceptions.Exit(INTERRUPTED) from error

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise self._explained(error, ctx) from None
        except InvalidParameterError as error:
            field = command_options().get(error.field, error.field)
            raise click.UsageError(f"{field}: {spelled(error.reason)}") from error

    def _explained(self, error: click.NoSuchOption, ctx: click.Context) -> click.NoSuchOption:
        """The same with what others call an option of the command, or the commands that have the option."""
        if error.ctx is None:
            return error
        known = {name.removeprefix("--").replace("-", "_"): name for name in _options_of(error.ctx.command)}
        near = nearest(error.option_name.removeprefix("--"), frozenset(known))
        owners = [name for name in COMMANDS if error.option_name in _options_of(self.get_command(ctx, name))]
        if near is None and not owners:
            return error
        hint = f"it is an option of {', '.join(owners)}" if owners else f"did you mean {known[near or '']}?"
        return click.NoSuchOption(error.option_name, f"No such option {error.option_name}; {hint}", ctx=error.ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # of the help, too
            if error.errno not in _NO_ROOM or error.filename is not None:
                raise  # a defect
            talk(f"Error: the output can't be written: {error.strerror}")
            drop_output()
            sys.exit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="minisgl-batch")
def cli() -> None:
    """Offline LLM inference as a service: prompts in, Parquet out.

    `run` does all in one. Or start a `worker` in one terminal, `submit` jobs in another, and watch them with `tail` or
    `status`. Without --redis (or MINISGL_REDIS) they use a Redis server of their own, which is started when needed.
    """
    talk_of_warnings()


def main() -> None:
    """The console script."""
    cli(prog_name="minisgl-batch")


if __name__ == "__main__":
    main()
