"""`minisgl-batch retry`: generates the failed rows of a job again."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import job_argument, json_option, redis_option
from minisgl_batch.cli.progress import follow
from minisgl_batch.cli.report import exit_code, report
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.status import status_record
from minisgl_batch.errors import JobNotFoundError
from minisgl_batch.words import count


@click.command()
@job_argument
@click.option("--wait", is_flag=True, help="Show progress until the job has ended again.")
@redis_option
@json_option
@click.pass_context
def retry(ctx: click.Context, job_id: str, wait: bool, redis_url: str | None, as_json: bool) -> None:
    """Generate the failed rows of a job again.

    They go into the same dataset, whose other rows stay as they are. Until the job has ended again there is no
    _SUCCESS. Only a partial job can be retried.
    """
    with open_client(redis_url) as client:
        try:
            job = client.job(job_id)
            num_failed = job.status().rows_error
        except JobNotFoundError as error:
            hint = "submit or run the same input to the same output with --retry-failed"
            raise JobNotFoundError(f"{error}; where only its dataset is left, {hint}") from error
        job.retry()
        talk(f"{count(num_failed, 'row')} of job {job_id} queued again")
        if wait:
            report(follow(job))
        found = job.status()
    if as_json:
        print_json(status_record(found))
    if wait:
        ctx.exit(exit_code(found.state))
