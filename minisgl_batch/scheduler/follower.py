"""A follower's process: a rank that runs what rank 0 runs, until rank 0 is told to stop.

Started by the in-process `LLM` and by the supervisor of a worker group.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from minisgl_batch.child_process import StatusPipe, die_with_parent, run_child, setup_logging
from minisgl_batch.distributed.place import FollowerConfig
from minisgl_batch.scheduler.rank import Rank, join


def main(config: FollowerConfig, status: StatusPipe) -> None:
    setup_logging(f"rank {config.place.rank}")
    signal.signal(signal.SIGTERM, _end if config.heeds_sigterm else signal.SIG_IGN)
    if config.in_worker:
        die_with_parent()
    links = join(config.engine, config.place)
    rank = Rank(config.engine, None, links)
    status.ready(lambda: links.progress)
    rank.scheduler.run()
    rank.close()


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)  # nothing here is worth a tidy end, which could wait for other ranks


def _leave(_config: FollowerConfig) -> None:
    """The lifeline's end. Not by `die_with_parent` in every case: a program may make its LLM in a thread that ends."""


if __name__ == "__main__":
    run_child("rank", FollowerConfig, main, on_orphaned=_leave)
