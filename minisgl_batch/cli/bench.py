"""`minisgl-batch bench`: the engine's throughput on standard workloads, a JSON line per run."""

from __future__ import annotations

import faulthandler
import os
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

import click

from minisgl_batch.child_process import DUMP_STACKS_ENV, setup_logging
from minisgl_batch.cli.options import engine_config, engine_options, model_option
from minisgl_batch.cli.sections import Number, SectionedCommand, WholeNumber
from minisgl_batch.engine_extra import require_engine

_PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4", "transformers")


@click.command(cls=SectionedCommand)
@click.argument("workloads", nargs=-1, required=True, metavar="WORKLOAD...")
@model_option
@engine_options
@click.option("--repeat", type=WholeNumber(min=1), metavar="N", default=1, show_default=True, help="Runs of each.")
@click.option(
    "--shrink", type=WholeNumber(min=1), metavar="N", default=1, help="Divide workloads and shapes, to try this out."
)
@click.option("--commit", metavar="ID", default="", help="What to say was measured.")
@click.option("--json", "file", type=click.File("a"), help="Append the lines to this file, too.")
@click.option("--timeout-s", type=Number(min=0, min_open=True), help="Say where it hangs and end after this time.")
def bench(
    workloads: tuple[str, ...],
    repeat: int,
    shrink: int,
    commit: str,
    file: TextIO | None,
    timeout_s: float | None,
    **options: Any,
) -> None:
    """Measure the engine alone on standard workloads.

    WORKLOAD is U (nothing in common), S (512 ids in common) or P (2,048 ids in common). MODEL may also be a shape,
    qwen3-0.6b, qwen3-14b, qwen3-32b, qwen3-30b-a3b or gpt-oss-20b, with --dummy-weights. Prints a line of JSON per run.
    """
    require_engine()
    setup_logging("bench")
    from minisgl_batch.bench import Bench, workload

    for name in workloads:
        workload(name)  # a wrong name shows before the model is loaded
    if timeout_s is not None:
        os.environ[DUMP_STACKS_ENV] = "1"  # for the other ranks
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    with Bench(engine_config(options), shrink) as engine:
        about = {
            "versions": {name: found for name in _PACKAGES if (found := _version(name))},
            "options": {**engine.description, "max_running": options["max_running"]},
            "commit": commit,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "command": "minisgl-batch " + " ".join(sys.argv[1:]),
        }
        for name in workloads:
            for _ in range(repeat):
                line = engine.run(name).line(**about)
                click.echo(line)
                if file is not None:
                    file.write(line + "\n")
                    file.flush()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
