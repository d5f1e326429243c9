"""`minisgl-batch run`: Redis, a worker group and one job, from a file to a dataset, in one command."""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import click

from minisgl_batch.cli.console import INTERRUPTED, print_json, talk
from minisgl_batch.cli.job_checks import check_biases, warn_of_dropped_tools
from minisgl_batch.cli.local_worker import LocalWorker
from minisgl_batch.cli.options import (
    engine_options,
    input_options,
    json_option,
    model_option,
    prepare_options,
    redis_option,
    sampling_options,
)
from minisgl_batch.cli.progress import follow
from minisgl_batch.cli.report import dataset_status, exit_code, report, show_errors
from minisgl_batch.cli.sections import SectionedCommand
from minisgl_batch.cli.service import open_client, open_redis
from minisgl_batch.cli.status import status_record
from minisgl_batch.cli.submit import tell_of_input
from minisgl_batch.cli.worker import describe_engine, worker_options
from minisgl_batch.client import Client, JobHandle
from minisgl_batch.engine_extra import require_engine
from minisgl_batch.errors import JobStateError, OutputError, RedisUnavailableError, WorkerError
from minisgl_batch.hub import model_path
from minisgl_jobs.folder_lock import lock_folder
from minisgl_jobs.keys import is_job_id
from minisgl_jobs.model import JobSpec
from minisgl_jobs.own_server import default_data_dir
from minisgl_jobs.owner import output_owner
from minisgl_jobs.parts import output_place
from minisgl_jobs.submission import Submission, output_folder, prepare
from minisgl_workers.options import WorkerOptions

WORKER_LOG = "_worker.log"  # data tools pass over names with a leading underscore


@click.command(cls=SectionedCommand)
@click.argument("source", metavar="FILE")
@model_option
@input_options
@sampling_options
@engine_options
@redis_option
@click.option("--verbose", is_flag=True, help="Show the worker's log.  [default: to OUTPUT/_worker.log]")
@json_option
@click.pass_context
def run(
    ctx: click.Context, /, source: str, redis_url: str | None, verbose: bool, as_json: bool, **options: Any
) -> None:
    """Turn a file of prompts into a dataset, all in one.

    FILE holds a row a line as JSON, such as {"prompt": "..."}, {"messages": [...]} or OpenAI batch lines, or a table
    (CSV, Parquet, Arrow), plain, gzip or zstd. It may be a path, a URL such as s3://bucket/rows.parquet, a folder of
    files, or "-" for standard input. Prints the folder of the Parquet dataset. Ctrl-C cancels; finished rows stay.
    """
    require_engine()
    asked = {**prepare_options(options), "model": options["served_model_name"] or options["model"]}
    check_biases(asked["params"], options["model"], options["revision"])
    with (
        _alone_in(_given_output(options), redis_url),
        prepare(source, **asked) as submission,
        _sigterm_as_interrupt(),
    ):
        tell_of_input(submission)
        if submission.has_tools:
            warn_of_dropped_tools(submission, model_path(options["model"], options["revision"], weights=False))
        resumption, is_interrupted = submission.resumption, False
        if resumption is not None and resumption.is_complete:  # no worker is needed for that
            status = dataset_status(submission.spec)
            show_errors(status)
        else:
            with open_redis(redis_url, private=True) as url, Client(url) as client:
                job, is_interrupted = _run_job(client, submission, worker_options(options, url), verbose=verbose)
                status = job.status()
                again = _changes(options, submission.spec, "--retry-failed")
                report(status, submission.examples, retry=f"the same command{again}")
    if is_interrupted:
        talk(f"start it again{_changes(options, submission.spec)} to go on with the other rows")
    if as_json:
        print_json(status_record(status))
    else:
        click.echo(status.spec.output)
    ctx.exit(INTERRUPTED if is_interrupted else exit_code(status.state))


def _run_job(
    client: Client, submission: Submission, options: WorkerOptions, *, verbose: bool
) -> tuple[JobHandle, bool]:
    """Run the job to its end; tells whether that was by a Ctrl-C."""
    output = output_place(submission.spec.output)
    if not isinstance(output, Path):  # a log isn't written to an object store line by line
        output = Path(tempfile.gettempdir()) / f"minisgl-{submission.spec.job_id}"
    with _worker_log(output, verbose) as log:
        try:
            with LocalWorker(options, log) as worker:
                talk(f"starting a worker for {options.model}")
                talk(f"ready ({describe_engine(worker.wait_ready())})")
                job = client.submit_prepared(submission, holds_output=True)
                return job, _follow(job, worker, live=not verbose)
        except WorkerError:
            if log is not None:
                is_lost = _holds_nothing_but_log(output)
                talk("--verbose shows the worker's log" if is_lost else f"the worker's log is {output / WORKER_LOG}")
            raise


def _follow(job: JobHandle, worker: LocalWorker, *, live: bool) -> bool:
    """Wait for the job's end; tells whether a Ctrl-C brought it."""
    try:
        follow(job, live=live, check=worker.check)
    except KeyboardInterrupt:
        talk("canceling, finished rows are kept; Ctrl-C again stops at once")
        try:
            job.cancel()
        except JobStateError as error:  # all rows were done
            talk(str(error))
        follow(job, live=live, patient=False, check=worker.check)
        return True
    return False


def _changes(options: dict[str, Any], spec: JobSpec, *more: str) -> str:
    """What the same command needs, or mustn't have, to go on with the dataset that it has begun."""
    needed = list(more)
    if options["output"] is None and options["job_id"] is None:  # it would be another job, with a folder of its own
        needed = ["--output", shlex.quote(spec.output), *needed]
    return (f" with {' '.join(needed)}" if needed else "") + (" without --overwrite" if options["overwrite"] else "")


def _given_output(options: dict[str, Any]) -> Path | None:
    """The local folder that another run may be given as well; None where there is none."""
    output, job_id = options["output"], options["job_id"] or ""
    if output is None and not is_job_id(job_id):  # it will be named after a new job, or refused
        return None
    folder = output_folder(output, job_id)
    return folder if isinstance(folder, Path) else None


@contextmanager
def _alone_in(output: Path | None, redis_url: str | None) -> Iterator[None]:
    """Hold an output folder until this run has ended: each has a Redis of its own, so two would do all work twice.

    Raises:
        OutputTakenError: another run has it, or a job of the Redis that this user's commands share.
    """
    if output is None:
        yield
        return
    made = _top_to_make(output)
    with suppress(OSError):  # which the output's own checks explain
        output.mkdir(parents=True, exist_ok=True)
    try:
        with lock_folder(output, alone=True):
            if redis_url is None:
                _refuse_service_job(output)
            yield
    except BaseException:
        if made is not None:
            _remove_empty(output, made)
        raise


def _refuse_service_job(output: Path) -> None:
    """Raise OutputTakenError if the Redis that this user's commands share has a job yet to write to a folder."""
    if output_owner(output) and default_data_dir().is_dir():
        # The server is started for it: jobs wait while it is down.
        with suppress(RedisUnavailableError), open_client(None) as client:
            client.refuse_running_output(output)


@contextmanager
def _worker_log(output: Path, verbose: bool) -> Iterator[IO[bytes] | None]:
    """Where the worker's log goes; None is standard error. A run that didn't get as far as a job leaves none."""
    if verbose:
        yield None
        return
    made = _top_to_make(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        log = (output / WORKER_LOG).open("wb")
    except OSError as error:
        raise OutputError(f"{output} can't be written: {error.strerror}") from error
    with log:
        try:
            yield log
        except BaseException:
            if _holds_nothing_but_log(output):
                (output / WORKER_LOG).unlink()
                if made is not None:
                    _remove_empty(output, made)
            raise


def _top_to_make(folder: Path) -> Path | None:
    """The uppermost folder of a path that isn't there yet, if any."""
    return next((path for path in reversed((folder, *folder.parents)) if not os.path.exists(path)), None)


def _holds_nothing_but_log(output: Path) -> bool:
    try:
        return os.listdir(output) == [WORKER_LOG]
    except OSError:
        return False


def _remove_empty(folder: Path, top: Path) -> None:
    """Remove a folder, and those above it up to `top`, as far as they are empty."""
    with suppress(OSError):
        for path in (folder, *folder.parents):
            path.rmdir()
            if path == top:
                return


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A SIGTERM ends a run as Ctrl-C does."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
