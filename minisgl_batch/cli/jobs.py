"""`minisgl-batch jobs`: the newest jobs."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, print_table, talk
from minisgl_batch.cli.options import json_option, redis_option
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.status import status_record
from minisgl_batch.words import duration, one_line


@click.command()
@click.option("--model", metavar="MODEL", help="Only jobs of this model.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most so many.")
@redis_option
@json_option
def jobs(model: str | None, limit: int, redis_url: str | None, as_json: bool) -> None:
    """List jobs, newest first."""
    with open_client(redis_url) as client:
        found = client.jobs(model=model, limit=limit)
    if as_json:
        print_json([status_record(job) for job in found])
        return
    if not found:
        talk("no jobs (finished ones expire after a week)")
        return
    rows = [
        (
            job.job_id,
            f"{job.state.value} (waiting)" if job.waiting else job.state.value,
            one_line(job.spec.model),
            f"{job.rows_done:,}/{job.spec.num_rows:,}",
            f"{job.rows_error:,}",
            f"{duration(job.now - job.created_at)} ago",
        )
        for job in found
    ]
    print_table(("JOB", "STATE", "MODEL", "ROWS", "FAILED", "SUBMITTED"), rows)
