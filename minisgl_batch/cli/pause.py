"""`minisgl-batch pause`: nothing more of a model's jobs is handed out."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import json_option, redis_option
from minisgl_batch.cli.service import open_client


@click.command()
@click.argument("model", metavar="MODEL")
@redis_option
@json_option
def pause(model: str, redis_url: str | None, as_json: bool) -> None:
    """Hand out nothing more of a model's jobs.

    Rows that workers have taken go on (a worker takes up to a few chunks ahead), and jobs can still be submitted,
    canceled and read. Lasts until `minisgl-batch resume MODEL`, also when Redis or workers are started anew.
    """
    with open_client(redis_url) as client:
        is_known = client.pause(model)
    if not is_known:
        talk(f"warning: no job or worker of {model} was seen yet: is this its name?")
    talk(f"{model} is paused: end this with `minisgl-batch resume {model}`")
    if as_json:
        print_json({"model": model, "paused": True})
