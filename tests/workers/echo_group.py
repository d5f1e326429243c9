"""A whole worker group, but for the model: python -m tests.workers.echo_group JSON. See `echo_rank`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from minisgl_batch.child_process import ChildPlan, setup_logging
from minisgl_batch.config import EngineConfig
from minisgl_batch.errors import MiniSGLError
from minisgl_workers.group import group_children, run_worker
from minisgl_workers.options import WorkerOptions
from tests.processes import Command
from tests.workers.echo_rank import EchoConfig

MODEL = "echo"


class EchoGroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the group, and of its engine. `spool_log`: see `tests.chaos.noting_frontend`."""

    redis_url: str
    lease_s: float = 15.0
    drain_s: float = 20.0
    hang_s: float = 300.0
    allow_roots: tuple[str, ...] = ()
    engine: EchoConfig = EchoConfig()
    spool_log: str = ""


def start_echo_group(
    redis_url: str, *, engine: EchoConfig | None = None, variables: dict[str, str] | None = None, **options: Any
) -> Command:
    """A group that serves MODEL, in a process of its own; its frontend has the demo model's tokenizer."""
    config = EchoGroupConfig(redis_url=redis_url, engine=engine or EchoConfig(), **options)
    return Command(msgspec.json.encode(config).decode(), module="tests.workers.echo_group", **(variables or {}))


def main(config: EchoGroupConfig) -> int:
    setup_logging("worker")
    options = WorkerOptions(
        engine=EngineConfig(model="demo"),
        redis_url=config.redis_url,
        served_model_name=MODEL,
        lease_s=config.lease_s,
        drain_s=config.drain_s,
        hang_s=config.hang_s,
        allow_roots=config.allow_roots,
    )

    def children(options: WorkerOptions, directory: Path) -> list[ChildPlan]:
        frontend, *others = group_children(options, directory)
        if config.spool_log:
            env = {"MINISGL_TEST_SPOOL_LOG": config.spool_log}
            frontend = replace(frontend, module="tests.chaos.noting_frontend", env=env)
        engine = msgspec.structs.replace(config.engine, sockets=str(directory))
        rank = ChildPlan("rank 0", "tests.workers.echo_rank", engine)
        return [frontend, rank, *(child for child in others if child.is_spare)]

    def ready(_: dict[str, dict[str, Any]]) -> None:
        print("serving", flush=True)  # noqa: T201

    try:
        run_worker(options, ready, children)
    except MiniSGLError as error:
        print(error, flush=True)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=EchoGroupConfig)))
