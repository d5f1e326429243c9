"""`minisgl-batch purge`: forgets jobs that have ended."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import job_shell_complete, json_option, redis_option
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.times import parse_duration
from minisgl_batch.errors import UsageError
from minisgl_batch.words import count


@click.command()
@click.argument("job_ids", nargs=-1, metavar="[JOB]...", shell_complete=job_shell_complete)
@click.option("--finished", is_flag=True, help="All jobs that have ended, in place of JOB.")
@click.option("--model", metavar="MODEL", help="With --finished: only jobs of this model.")
@click.option(
    "--older-than", type=parse_duration, metavar="TIME", help="With --finished: ended so long ago, such as 2d."
)
@click.option("--output", "with_output", is_flag=True, help="Remove the datasets of these JOBs, too.")
@redis_option
@json_option
def purge(
    job_ids: tuple[str, ...],
    finished: bool,
    model: str | None,
    older_than: float | None,
    with_output: bool,
    redis_url: str | None,
    as_json: bool,
) -> None:
    """Forget jobs that have ended.

    Their keys leave Redis before they expire by themselves, a week after the end. Datasets stay, unless --output is
    given; other files in their folders stay in any case. A job that runs is to be canceled first.
    """
    if bool(job_ids) == finished:
        raise UsageError("say which jobs: name some, or give --finished")
    if not finished and (model is not None or older_than is not None):
        raise UsageError("--model and --older-than choose among finished jobs: give --finished, or name jobs alone")
    if finished and with_output:
        raise UsageError("--output removes data: name the jobs whose datasets are to go")
    with open_client(redis_url) as client:
        if finished:
            purged = client.purge(model=model, older_than_s=older_than or 0.0)
        else:
            purged = list(dict.fromkeys(job_ids))
            for job in [client.job(job_id) for job_id in purged]:  # a wrong name shows before anything is forgotten
                job.purge(output=with_output)
    talk(f"{count(len(purged), 'job')} purged")
    if as_json:
        print_json(purged)
