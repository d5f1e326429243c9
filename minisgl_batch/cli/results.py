"""`minisgl-batch results`: a job's results in the formats that other tools take."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import job_argument, redis_option
from minisgl_batch.cli.service import open_client
from minisgl_batch.errors import InvalidParameterError, OutputError, UsageError
from minisgl_batch.words import count
from minisgl_jobs.export import EXPORT_FORMATS, ExportFormat, export_rows
from minisgl_jobs.model import JobState


@click.command()
@job_argument
@click.option(
    "--format",
    "export_format",
    type=click.Choice(EXPORT_FORMATS),
    default="jsonl",
    show_default=True,
    help="jsonl: one object a result; openai: OpenAI batch output; csv; parquet: one file.",
)
@click.option("-o", "--output", metavar="FILE", help="Write here.  [default: standard output]")
@click.option("--partial", is_flag=True, help="What is finished so far, while the job runs.")
@redis_option
@click.option("--json", "as_json", is_flag=True, help="With --output: print what was written as JSON, for scripts.")
def results(
    job_id: str,
    export_format: ExportFormat,
    output: str | None,
    partial: bool,
    redis_url: str | None,
    as_json: bool,
) -> None:
    """Write a job's results as JSONL, OpenAI batch output, CSV or Parquet.

    With --partial also those of a job that runs: of the parts that are written, and of rows that have finished since.
    """
    if as_json and output is None:
        raise UsageError("standard output has the results themselves: --json needs --output FILE")
    if output is None and export_format == "parquet" and sys.stdout.isatty():
        raise UsageError("Parquet isn't for a terminal: give --output FILE")
    with open_client(redis_url) as client:
        job = client.job(job_id)
        found = job.status()
        batches = job.batches(partial=partial)
        if found.state in (JobState.CANCELED, JobState.FAILED):
            talk(f"job {job_id} was {found.state.value}: these are the rows that were finished")
        with _target(output) as out:
            num_written = export_rows(batches, export_format, out, chat=found.spec.chat)
    if as_json:
        print_json({"job_id": job_id, "state": found.state.value, "num_results": num_written, "output": output})
    elif output is not None:
        talk(f"{count(num_written, 'result')} written to {output}")


@contextmanager
def _target(output: str | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that is there whole at the end or not at all; pipes and devices are written to."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(os.path.realpath(output))  # a link stays, and what it leads to is written
    if path.is_dir():
        raise InvalidParameterError("output", f"{output!r} is a folder: name a file")
    try:
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
