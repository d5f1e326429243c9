"""`minisgl-batch workers`: the living worker groups."""

from __future__ import annotations

import json
import time

import click
import msgspec

from minisgl_batch.cli.console import duration, print_table, talk
from minisgl_batch.cli.options import json_option, redis_option
from minisgl_batch.cli.service import open_client


@click.command()
@click.option("--model", metavar="MODEL", help="Only workers of this model.")
@redis_option
@json_option
def workers(model: str | None, redis_url: str | None, as_json: bool) -> None:
    """List living workers."""
    with open_client(redis_url) as client:
        found = client.workers(model=model)
    if as_json:
        fields = msgspec.structs.fields
        click.echo(json.dumps([{field.name: getattr(w, field.name) for field in fields(w)} for w in found]))
        return
    if not found:
        talk("no workers: start one with `minisgl-batch worker --model MODEL`")
        return
    rows = [
        (
            worker.worker_id,
            worker.model,
            f"{worker.num_running:,}",
            f"{worker.num_waiting:,}",
            f"{worker.tokens_per_s:,.0f}",
            f"{worker.cached_tokens / worker.prompt_tokens:.0%}" if worker.prompt_tokens else "-",
            duration(time.time() - worker.since),
            " ".join(str(worker.description[name]) for name in ("device", "dtype") if name in worker.description),
        )
        for worker in found
    ]
    print_table(("WORKER", "MODEL", "RUNNING", "WAITING", "TOK/S", "CACHED", "UP", "ON"), rows)
