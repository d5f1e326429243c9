"""`minisgl-batch jobs`: the newest jobs."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, print_table, talk
from minisgl_batch.cli.options import json_option, redis_option
from minisgl_batch.cli.sections import WholeNumber
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.status import progress_record
from minisgl_batch.client.show import JOB_COLUMNS, job_row


@click.command()
@click.option("--model", metavar="MODEL", help="Only jobs of this model.")
@click.option("--limit", type=WholeNumber(min=1), default=20, show_default=True, help="At most so many.")
@redis_option
@json_option
def jobs(model: str | None, limit: int, redis_url: str | None, as_json: bool) -> None:
    """List jobs, newest first."""
    with open_client(redis_url) as client:
        found = client.overview(model=model, limit=limit).jobs
    if as_json:
        print_json([progress_record(job, None) for job in found])
        return
    if not found:
        talk("no jobs (finished ones expire after a week)")
        return
    print_table(JOB_COLUMNS, [job_row(job) for job in found])
