"""`minisgl-batch submit`: checks a file of prompts and queues it, or only says what it would come to."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from minisgl_batch.cli.console import print_json, show_faults, talk
from minisgl_batch.cli.dry_run import dry_run
from minisgl_batch.cli.job_checks import warn_of_dropped_tools
from minisgl_batch.cli.options import (
    input_options,
    job_shell_complete,
    json_option,
    model_option,
    prepare_options,
    redis_option,
    sampling_options,
)
from minisgl_batch.cli.progress import follow
from minisgl_batch.cli.report import exit_code, may_succeed, report
from minisgl_batch.cli.sections import SectionedCommand
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.status import status_record
from minisgl_batch.cli.times import parse_moment
from minisgl_batch.client import Client, JobHandle
from minisgl_batch.client.advice import warn_if_tools_are_dropped, warn_if_unserved
from minisgl_batch.hub import folder_here
from minisgl_batch.words import count
from minisgl_jobs.model import Priority
from minisgl_jobs.resume import Resumption
from minisgl_jobs.status import JobStatus
from minisgl_jobs.submission import Submission, prepare


@click.command(cls=SectionedCommand)
@click.argument("source", metavar="FILE")
@model_option
@input_options
@sampling_options
@redis_option
@click.option(
    "--priority",
    type=click.Choice([level.value for level in Priority]),
    default=Priority.NORMAL.value,
    show_default=True,
    help="Which jobs are served first.",
)
@click.option("--after", metavar="JOB", shell_complete=job_shell_complete, help="Start when this job has ended well.")
@click.option(
    "--at", "start_at", type=parse_moment, metavar="TIME", help="Start then: 2026-12-01T08:00, 08:00, or 2h from now."
)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Queue nothing: count rows and tokens, and estimate.")
@click.option("--wait", is_flag=True, help="Show progress until the job has ended.")
@json_option
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    source: str,
    redis_url: str | None,
    priority: str,
    after: str | None,
    start_at: datetime | None,
    is_dry_run: bool,
    wait: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check a file of prompts and queue it as a job.

    FILE holds a row a line as JSON, such as {"prompt": "..."}, {"messages": [...]} or OpenAI batch lines, or a table
    (CSV, Parquet, Arrow), plain, gzip or zstd. It may be a path, a URL such as s3://bucket/rows.parquet, a folder of
    files, or "-" for standard input. Prints the job's id. Nothing is queued when any row can't be used.

    With --after, the job starts when the other one has ended finished or partial; when that fails, is canceled or is
    gone, this one is canceled, and its status says why.
    """
    if after is not None and not is_dry_run:
        with open_client(redis_url) as client:
            client.check_predecessor(after)  # before a long input is read
    with prepare(source, priority=priority, **prepare_options(options)) as submission:
        if is_dry_run:
            tell_of_input(submission)
            all_good = dry_run(submission, redis_url, max_faults=options["max_faults"], as_json=as_json)
            ctx.exit(0 if all_good else 1)
        with open_client(redis_url) as client:
            job = client.submit_prepared(submission, after=after, start_at=start_at)
            tell_of_input(submission)  # by now it is true that it goes on
            status = job.status()
            spec = status.spec
            if as_json and not wait:
                record = {"job_id": job.id, "model": spec.model, "num_rows": spec.num_rows, "output": spec.output}
                print_json({**record, "waiting": status.waiting or None})
            elif not as_json:
                click.echo(job.id)
            if not (submission.resumption is not None and submission.resumption.is_complete):  # which was told
                _tell_of_job(client, status, submission)
                if not wait:
                    talk(f"watch it: minisgl-batch tail {job.id}")
            if not wait:
                return
            ended = _wait(job)
            report(ended, submission.examples)
            if as_json:
                print_json(status_record(ended))
    ctx.exit(exit_code(ended.state))


def _tell_of_job(client: Client, status: JobStatus, submission: Submission) -> None:
    """What was queued, and what keeps it from running."""
    spec = status.spec
    where = f"for {spec.model}, to be written to {spec.output}"
    if spec.submitted_at == submission.spec.submitted_at:
        there = submission.resumption.num_rows if submission.resumption is not None else 0
        talk(f"{count(spec.num_rows - there, 'row')} queued {where}")
    else:
        talk(f"job {spec.job_id} is {status.state.value} already, {where}")
    if status.is_held:
        talk(f"it waits for {status.waiting}")
    workers = client.workers()
    warn_if_unserved(spec.model, workers)
    if (folder := folder_here(spec.model)) is not None:
        warn_of_dropped_tools(submission, folder)
    else:
        warn_if_tools_are_dropped(submission, workers)


def _wait(job: JobHandle) -> JobStatus:
    try:
        return follow(job)
    except KeyboardInterrupt:
        talk(f"job {job.id} goes on; watch it: minisgl-batch tail {job.id}")
        raise


def tell_of_input(submission: Submission) -> None:
    """What a user should know about an input that can be used all the same."""
    if submission.resumption is not None:
        spec, found = submission.spec, submission.resumption
        what = "has nothing left to do" if found.is_complete else "goes on"
        there = f"{found.num_rows:,} of {count(spec.num_rows, 'row')} are in {spec.output}"
        talk(f"job {spec.job_id} {what}: {there}{_failed_there(found)}")
    faults = submission.faults
    if faults.num_faults:
        talk(f"{faults.num_faults} of {count(submission.spec.num_rows, 'row')} can't be used and become error rows:")
        show_faults(faults.first, faults.num_faults)
    others = [model for model in submission.models if model != submission.spec.model]
    if others:
        talk(f"the input names {', '.join(others)}; the job runs on {submission.spec.model}")


def _failed_there(resumption: Resumption) -> str:
    """What there is to say of failed rows that are in the output."""
    if not resumption.num_failed:
        return ""
    if resumption.num_retried:
        runs = "failed row runs" if resumption.num_retried == 1 else "failed rows run"
        return f"; {resumption.num_retried:,} {runs} again"
    failed = f", {resumption.num_failed:,} of them failed"
    if not may_succeed(resumption.error_types):
        return failed
    return f"{failed}; to run those again: the same command with --retry-failed"
