"""`minisgl-batch cancel`: stops a job."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import job_argument, json_option, redis_option
from minisgl_batch.cli.progress import follow
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.status import status_record


@click.command()
@job_argument
@click.option("--wait", is_flag=True, help="Until its rows have stopped and the manifest is written.")
@redis_option
@json_option
def cancel(job_id: str, wait: bool, redis_url: str | None, as_json: bool) -> None:
    """Stop a job; finished rows stay.

    Its readers see it at once. Jobs that were to follow it are canceled, too. May be repeated.
    """
    with open_client(redis_url) as client:
        job = client.job(job_id)
        job.cancel()
        found = follow(job) if wait else job.status()
    if as_json:
        print_json(status_record(found))
    talk(f"job {job_id} is {found.state.value}; finished rows stay in {found.spec.output}")
