"""`minisgl-batch workers`: the living worker groups."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, print_table, talk
from minisgl_batch.cli.options import json_option, redis_option
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.status import worker_record
from minisgl_batch.client.show import WORKER_COLUMNS, worker_row


@click.command()
@click.option("--model", metavar="MODEL", help="Only workers of this model.")
@redis_option
@json_option
def workers(model: str | None, redis_url: str | None, as_json: bool) -> None:
    """List living workers."""
    with open_client(redis_url) as client:
        found = client.workers(model=model)
    if as_json:
        print_json([worker_record(worker) for worker in found])
    elif found:
        print_table(WORKER_COLUMNS, [worker_row(worker) for worker in found])
    else:
        talk("no workers: start one with `minisgl-batch worker --model MODEL`")
