"""A rank process: the scheduler and the engine of one device, until told to stop."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl_batch.config import EngineConfig
from minisgl_batch.scheduler.factory import make_scheduler
from minisgl_workers.links import EngineSide
from minisgl_workers.process import StatusPipe, run_child


class RankConfig(msgspec.Struct, frozen=True):
    """What the supervisor tells a rank.

    Attributes:
        engine: the engine's options.
        socket_directory: where the group's sockets are.
    """

    engine: EngineConfig
    socket_directory: str


def main(config: RankConfig, status: StatusPipe) -> None:
    link = EngineSide(Path(config.socket_directory))
    try:
        scheduler = make_scheduler(config.engine, link)
        status.ready()
        scheduler.run()
    finally:
        link.close()


if __name__ == "__main__":
    run_child("rank 0", RankConfig, main)
