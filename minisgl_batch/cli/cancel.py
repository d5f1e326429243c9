"""`minisgl-batch cancel`: stops a job."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import talk
from minisgl_batch.cli.options import job_argument, redis_option
from minisgl_batch.cli.service import open_client


@click.command()
@job_argument
@redis_option
def cancel(job_id: str, redis_url: str | None) -> None:
    """Stop a job; finished rows stay."""
    with open_client(redis_url) as client:
        job = client.job(job_id)
        job.cancel()
        found = job.status()
    talk(f"job {job_id} is {found.state.value}; finished rows stay in {found.spec.output}")
