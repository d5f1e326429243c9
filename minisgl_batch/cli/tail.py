"""`minisgl-batch tail`: a job's texts as they are generated.

All rows: a line for each finished sample, name and text with a tab between; on a terminal also what is being generated
now. One row (`--row`): its text as it comes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType

import click
import msgspec
from rich.live import Live
from rich.text import Text

from minisgl_batch.cli.console import print_json, print_line, stdout_console, talk
from minisgl_batch.cli.options import job_argument, json_option, redis_option
from minisgl_batch.cli.report import exit_code
from minisgl_batch.cli.sections import WholeNumber
from minisgl_batch.cli.service import open_client
from minisgl_batch.words import count, harmless, one_line
from minisgl_jobs.model import JobState
from minisgl_jobs.reader import Event, JobChanged
from minisgl_jobs.row_texts import RowEvent, RowFinished, RowStarted, RowText

MAX_GROWING = 8  # texts that are shown while they grow
REFRESH_PER_S = 8
EVENT_NAMES = {JobChanged: "job", RowStarted: "started", RowText: "text", RowFinished: "finished"}


@click.command()
@job_argument
@click.option("--row", type=WholeNumber(min=0), help="Only this row, its text as it comes.")
@redis_option
@json_option
@click.pass_context
def tail(ctx: click.Context, job_id: str, row: int | None, redis_url: str | None, as_json: bool) -> None:
    """Show a job's texts as they are generated.

    Whenever it is started, all rows are shown, each once. Ends with the job: exit code 0 only when every row succeeded.
    Ctrl-C ends the view, not the job. With --json, a line for each event as it comes: "job" (its state), "started" (a
    sample's text begins, or begins anew), "text" (more of it; "is_reasoning" tells of what) and "finished".
    """
    with open_client(redis_url) as client:
        job = client.job(job_id)
        found = job.status()
        if found.waiting:
            talk(f"the job is {found.state.value}, waiting: {found.waiting}")
        events = job.stream(None if row is None else [row])
        if as_json:
            _tail_json(events)
        else:
            show = _tail_all if row is None else _tail_row
            show(_row_events(events, told=found.state if found.waiting else None))
        found = job.status()
    talk(f"job {job_id} is {found.state.value}: {count(found.rows_ok, 'row')} ok, {found.rows_error:,} failed")
    ctx.exit(exit_code(found.state))


def _tail_json(events: Iterable[Event]) -> None:
    for event in events:
        print_json({"event": EVENT_NAMES[type(event)], **msgspec.to_builtins(event)})


def _row_events(events: Iterable[Event], told: JobState | None) -> Iterator[RowEvent]:
    """The events of rows; tells of the job's states but for its last, and for the one that was told of before."""
    for event in events:
        if not isinstance(event, JobChanged):
            yield event
        elif not event.state.is_final and event.state is not told:
            told = event.state
            talk(f"the job is {told.value}")


def _tail_all(events: Iterable[RowEvent]) -> None:
    texts: dict[tuple[int, int], list[str]] = {}
    with _Screen(texts) as screen:
        for event in events:
            key = (event.row_index, event.sample_index)
            match event:
                case RowStarted():
                    texts[key] = []
                case RowText(text=text, is_reasoning=False):
                    texts[key].append(text)
                case RowFinished():
                    screen.finished(event, "".join(texts.pop(key)))


class _Screen:
    """Finished samples as lines and, on a terminal, the ends of the texts that grow below them."""

    def __init__(self, growing: dict[tuple[int, int], list[str]]) -> None:
        self._growing = growing
        self._live: Live | None = None
        if sys.stdout.isatty():
            console = stdout_console()
            self._live = Live(
                console=console,
                get_renderable=self._render,
                transient=True,
                refresh_per_second=REFRESH_PER_S,
                redirect_stdout=False,
                redirect_stderr=sys.stderr.isatty(),
            )

    def finished(self, event: RowFinished, text: str) -> None:
        name = one_line(event.custom_id) or str(event.row_index)
        if event.sample_index:
            name += f"[{event.sample_index}]"
        if event.error is not None:
            talk(one_line(f"{name}: {event.error.type}: {event.error.message}"))
        elif self._live is None:
            print_line(f"{name}\t{one_line(text)}")
        else:
            line = Text.assemble((name, "bold"), "\t", one_line(text))
            self._live.console.print(line, soft_wrap=True)

    def _render(self) -> Text:
        width = stdout_console().width
        lines = []
        for (row, sample), pieces in list(self._growing.items())[:MAX_GROWING]:
            name = f"{row}[{sample}] " if sample else f"{row} "
            room = max(10, width - len(name) - 1)
            lines.append(name + one_line("".join(pieces[-room:]))[-room:])
        return Text("\n".join(lines), style="dim", no_wrap=True)

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _tail_row(events: Iterable[RowEvent]) -> None:
    """The texts of one row's samples, one after the other; those that are ahead of their turn wait."""
    texts: dict[int, str] = {}
    ended: dict[int, RowFinished] = {}
    turn = num_shown = 0
    thinking: set[int] = set()
    for event in events:
        sample = event.sample_index
        match event:
            case RowStarted():
                texts[sample] = ""
                thinking.discard(sample)
                if sample == turn and num_shown:
                    _show("\n")
                    talk("the row starts anew: its worker was lost")
                    num_shown = 0
            case RowText(text=text, is_reasoning=is_reasoning):
                texts[sample] += ("\n\n" if sample in thinking and not is_reasoning else "") + text
                (thinking.add if is_reasoning else thinking.discard)(sample)
            case RowFinished():
                ended[sample] = event
        while turn in texts:
            _show(texts[turn][num_shown:])
            num_shown = len(texts[turn])
            if turn not in ended:
                break
            _show("\n")
            error = ended[turn].error
            if error is not None:
                talk(one_line(f"failed: {error.type}: {error.message}"))
            turn, num_shown = turn + 1, 0


def _show(text: str) -> None:
    """Text as it is, and harmless to a terminal."""
    if sys.stdout.isatty():
        text = harmless(text)
    if text:
        click.echo(text, nl=False)
