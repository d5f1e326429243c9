"""`minisgl-batch worker`: a worker group in the foreground."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import click

from minisgl_batch.child_process import setup_logging
from minisgl_batch.cli.console import print_json, talk
from minisgl_batch.cli.options import (
    engine_config,
    engine_options,
    json_option,
    model_option,
    redis_option,
)
from minisgl_batch.cli.sections import Number, SectionedCommand, WholeNumber
from minisgl_batch.cli.service import open_redis
from minisgl_batch.cli.values import valid_unicode
from minisgl_batch.engine_extra import require_engine
from minisgl_batch.errors import InvalidParameterError
from minisgl_jobs.connection import safe_url
from minisgl_jobs.leases import LEASE_S
from minisgl_jobs.roots import SEPARATOR, VARIABLE
from minisgl_workers.options import DRAIN_S, HANG_S, INPUT_S, Node, WorkerOptions

_FOR_THE_RECORD = ("model_fingerprint", "default_sampling", "minisgl_batch", "torch")  # see `workers --json`


class Root(click.types.StringParamType):
    """A folder or URL; several in a variable are separated by semicolons, as URLs hold colons."""

    name = "DIR"
    envvar_list_splitter = SEPARATOR


@click.command(cls=SectionedCommand)
@model_option
@redis_option
@engine_options
@click.option("--lease-s", type=Number(min=0.5), default=LEASE_S, show_default=True, hidden=True)
@click.option(
    "--drain-s",
    type=Number(min=0),
    default=DRAIN_S,
    show_default=True,
    help="How long running rows may go on after the first Ctrl-C or SIGTERM, in seconds.",
)
@click.option(
    "--allow-root",
    "allow_roots",
    type=Root(),
    callback=valid_unicode,
    multiple=True,
    envvar=VARIABLE,
    help="Read and write only under this folder or URL, such as s3://bucket/prefix; may be repeated.  "
    f"[env: {VARIABLE}, with ; between several]",
)
@click.option(
    "--hang-s",
    type=Number(min=1),
    default=HANG_S,
    show_default=True,
    help="A process that has work and makes no progress for so many seconds hangs: the group is started again.",
)
@click.option(
    "--input-s",
    type=Number(min=1),
    default=INPUT_S,
    show_default=True,
    help="A job whose input doesn't give a chunk's rows in so many seconds is left to other workers for a while.",
)
@click.option(
    "--groups",
    "num_groups",
    type=WholeNumber(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Copies of the model on this host, each with --tp devices of its own.",
)
@click.option(
    "--nodes",
    "num_nodes",
    type=WholeNumber(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Hosts that the ranks of --tp are spread over; start a worker on each.",
)
@click.option(
    "--node-rank", type=WholeNumber(min=0), metavar="R", default=0, help="Which of the hosts this is, from 0."
)
@click.option("--rendezvous", metavar="HOST:PORT", help="Where the hosts' ranks meet: an address of the first host.")
@json_option
def worker(redis_url: str | None, num_groups: int, as_json: bool, **options: Any) -> None:
    """Serve a model: run jobs until stopped.

    The first Ctrl-C (or SIGTERM) drains: rows that run may finish, others are handed back. A second one stops at once;
    nothing is lost in either case.
    """
    require_engine()
    setup_logging("worker")
    from minisgl_workers.group import run_worker
    from minisgl_workers.groups import Groups

    node = node_options(options, num_groups)
    has_frontend = node is None or node.rank == 0
    with open_redis(redis_url) if has_frontend else nullcontext("") as url:
        configured = worker_options(options, url, node)

        def ready(group: int, info: dict[str, dict[str, Any]]) -> None:
            name = f"group {group}: " if num_groups > 1 else ""
            if has_frontend:
                source = f"jobs for {configured.model} from {safe_url(configured.redis_url)}"
                talk(f"{name}serving {source} ({describe_engine(info)})")
            else:
                talk(f"{', '.join(info)} of {configured.model} are ready")
            if as_json:  # a line whenever a group serves (again)
                print_json({"model": configured.model, "group": group, "processes": info})

        if num_groups == 1:
            run_worker(configured, lambda info: ready(0, info))
        else:
            Groups(configured, num_groups, ready).run()


def node_options(options: dict[str, Any], num_groups: int) -> Node | None:
    """Which host of several this is; None for a group on one host.

    Raises:
        InvalidParameterError: the options don't fit together.
    """
    num_nodes, rank, rendezvous, tp = (options[name] for name in ("num_nodes", "node_rank", "rendezvous", "tp"))
    if num_nodes == 1:
        if rank or rendezvous:
            raise InvalidParameterError("nodes", "--node-rank and --rendezvous are for --nodes 2 and more")
        return None
    if num_groups > 1:
        raise InvalidParameterError("groups", "a worker that is one of several --nodes has one group")
    if rank >= num_nodes:
        raise InvalidParameterError("node_rank", f"must be below --nodes {num_nodes}, got {rank}")
    if tp % num_nodes:
        raise InvalidParameterError("tp", f"{tp} ranks can't be spread evenly over {num_nodes} hosts")
    host, _, port = (rendezvous or "").rpartition(":")
    if not host or not port.isdigit():
        raise InvalidParameterError("rendezvous", "several --nodes need --rendezvous HOST:PORT, of the first of them")
    return Node(num_nodes, rank, rendezvous)


def worker_options(options: dict[str, Any], redis_url: str, node: Node | None = None) -> WorkerOptions:
    """A worker group's options in the values of a command's.

    Raises:
        InvalidParameterError: a value can't be used; names the field.
    """
    given = {
        name: options[name] for name in ("lease_s", "drain_s", "hang_s", "input_s", "allow_roots") if name in options
    }
    return WorkerOptions(
        engine=engine_config(options),
        redis_url=redis_url,
        served_model_name=options["served_model_name"],
        node=node,
        **given,
    )


def describe_engine(info: dict[str, dict[str, Any]]) -> str:
    """What a group that serves now runs on, from the ready information of its processes."""
    engine = info["frontend"]["engine"]
    return ", ".join(f"{name} {value}" for name, value in engine.items() if name not in _FOR_THE_RECORD)
