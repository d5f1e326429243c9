"""The process of rank 0: the scheduler and the engine that a frontend talks to, until told to stop."""

from __future__ import annotations

import signal
from pathlib import Path

from minisgl_batch.child_process import StatusPipe, run_child
from minisgl_batch.scheduler.rank import Links, Rank, join
from minisgl_workers.links import EngineSide
from minisgl_workers.options import RankConfig


def main(config: RankConfig, status: StatusPipe) -> None:
    # The frontend tells it when to stop. A service manager may send the signal to all processes of a group, and rows
    # that run shall finish.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = EngineSide(Path(config.socket_directory))
    try:
        rank = Rank(config.engine, link, Links() if config.place is None else join(config.engine, config.place))
        status.ready(lambda: link.progress)
        rank.scheduler.run()
        rank.close()
    finally:
        link.close()


if __name__ == "__main__":
    run_child("rank 0", RankConfig, main)
