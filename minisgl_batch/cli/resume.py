"""`minisgl-batch resume`: ends a pause."""

from __future__ import annotations

import click

from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import json_option, redis_option
from minisgl_batch.cli.service import open_client


@click.command()
@click.argument("model", metavar="MODEL")
@redis_option
@json_option
def resume(model: str, redis_url: str | None, as_json: bool) -> None:
    """End a pause: hand out a model's jobs again."""
    with open_client(redis_url) as client:
        was_paused = client.resume(model)
    talk(f"{model} runs again" if was_paused else f"{model} wasn't paused")
    if as_json:
        print_json({"model": model, "paused": False})
