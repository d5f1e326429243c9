"""`minisgl-batch results`: a job's results in the formats that other tools take."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click
import pyarrow as pa

from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import job_shell_complete, redis_option
from minisgl_batch.cli.service import open_client
from minisgl_batch.client import JobHandle
from minisgl_batch.errors import InvalidParameterError, JobNotFoundError, JobStateError, OutputError, UsageError
from minisgl_batch.words import count
from minisgl_jobs.dataset import dataset_job, read_batches, read_manifest
from minisgl_jobs.export import ENDINGS, EXPORT_FORMATS, ExportFormat, export_rows
from minisgl_jobs.model import JobState
from minisgl_jobs.owner import read_owner
from minisgl_jobs.parts import output_place, part_names
from minisgl_jobs.places import Place, place
from minisgl_jobs.stores import url_scheme

_STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_DESCRIPTOR = re.compile(r"/dev/(stderr)|(?:/dev/fd|/proc/self/fd)/([0-9]+)")


@click.command()
@click.argument("source", metavar="JOB|FOLDER", shell_complete=job_shell_complete)
@click.option(
    "--format",
    "export_format",
    type=click.Choice(EXPORT_FORMATS),
    help="jsonl: one object a result; openai: OpenAI batch output; csv; parquet: one file.  [default: by the ending of "
    "--output; jsonl without one]",
)
@click.option("-o", "--output", metavar="FILE", help="Write here.  [default: standard output]")
@click.option("--partial", is_flag=True, help="What is finished so far, while the job runs.")
@redis_option
@click.option("--json", "as_json", is_flag=True, help="With --output: print what was written as JSON, for scripts.")
def results(
    source: str,
    export_format: ExportFormat | None,
    output: str | None,
    partial: bool,
    redis_url: str | None,
    as_json: bool,
) -> None:
    """Write a job's results as JSONL, OpenAI batch output, CSV or Parquet.

    With --partial also those of a job that runs: of the parts that are written, and of rows that have finished since.
    In place of a job, the folder or URL of its dataset is enough: that is read as it is, without Redis.
    """
    if output in _STDOUT:
        output = None
    if as_json and output is None:
        raise UsageError("standard output has the results themselves: --json needs --output FILE")
    export_format = export_format or _format_of(output)
    if output is None and export_format == "parquet" and sys.stdout.isatty():
        raise UsageError("Parquet isn't for a terminal: give --output FILE")
    with ExitStack() as stack:
        folder = _dataset_folder(source)
        if folder is not None:
            found = _of_folder(folder, partial=partial)
        else:
            try:
                found = _of_job(stack.enter_context(open_client(redis_url)).job(source), partial=partial)
            except JobNotFoundError as error:
                raise JobNotFoundError(f"{error}; and no folder of that name holds a dataset") from error
        if output is not None:
            _refuse_inside(found.folder, output)
        if found.state in (JobState.CANCELED, JobState.FAILED):
            talk(f"job {found.job_id} was {found.state.value}: these are the rows that were finished")
        num_written = export_rows(found.batches, export_format, stack.enter_context(_target(output)), chat=found.chat)
    if as_json:
        state = found.state.value if found.state is not None else None
        print_json({"job_id": found.job_id, "state": state, "num_results": num_written, "output": output})
    elif output is not None:
        talk(f"{count(num_written, 'result')} written to {output}")


@dataclass(frozen=True)
class _Results:
    """What there is to write; the state is None where only an unfinished dataset is known."""

    job_id: str
    state: JobState | None
    chat: bool
    folder: Place
    batches: Iterator[pa.RecordBatch]


def _of_job(job: JobHandle, *, partial: bool) -> _Results:
    status = job.status()
    if not status.state.is_final and not partial:
        raise JobStateError(f"job {job.id} is {status.state.value}: wait for its end, or give --partial")
    spec = status.spec
    return _Results(job.id, status.state, spec.chat, output_place(spec.output), job.batches(partial=partial))


def _of_folder(folder: Place, *, partial: bool) -> _Results:
    manifest = read_manifest(folder)
    if manifest is not None:
        return _Results(manifest.job_id, manifest.state, manifest.chat, folder, read_batches(folder))
    if not partial:
        raise OutputError(f"{folder} holds a dataset that isn't finished: --partial writes the parts that are there")
    spec = read_owner(folder)
    return _Results(dataset_job(folder), None, spec is not None and spec.chat, folder, read_batches(folder))


def _refuse_inside(folder: Place, output: str) -> None:
    """Raise InvalidParameterError for a file in the dataset's own folder, whose readers would get its rows twice."""
    if isinstance(folder, Path) and Path(os.path.realpath(folder)) in Path(os.path.realpath(output)).parents:
        reason = f"{output!r} is in the dataset's own folder, {folder}, whose readers would get rows twice"
        raise InvalidParameterError("output", f"{reason}: write it elsewhere")


def _dataset_folder(source: str) -> Place | None:
    """The dataset that is meant, if it isn't a job."""
    if url_scheme(source):
        return place(source)
    folder = Path(os.path.abspath(source))
    return folder if os.path.isdir(folder) and (dataset_job(folder) or part_names(folder)) else None


def _format_of(output: str | None) -> ExportFormat:
    """What a file's name says; JSON lines for standard output, and where the name has no ending, as pipes'."""
    ending = Path(output or "").suffix.lower()
    if ending and ending not in ENDINGS:
        raise InvalidParameterError(
            "output", f"{output!r} ends in none of {', '.join(ENDINGS)}: end it so, or say which `export_format`"
        )
    return ENDINGS[ending] if ending else "jsonl"


@contextmanager
def _target(output: str | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that is there whole at the end or not at all; what is no file is written to."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(os.path.realpath(output))  # a link stays, and what it leads to is written
    if os.path.isdir(path):  # where Path.is_dir fails, such as on a name that is too long, writing tells why
        raise InvalidParameterError("output", f"{output!r} is a folder: name a file")
    try:
        if found := _DESCRIPTOR.fullmatch(output):  # which may append to a file: opened by name it would be replaced
            with os.fdopen(os.dup(int(found[2] or 2)), "wb") as file:
                yield file
            return
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        pending = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with pending.open("wb") as file:
                yield file
            pending.replace(path)
        finally:
            pending.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{output} can't be written: {error.strerror or error}") from error
