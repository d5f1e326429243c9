"""A follower's process: a rank that runs what rank 0 runs, until rank 0 is told to stop.

Started by the in-process `LLM` and by the supervisor of a worker group.
"""

from __future__ import annotations

from minisgl_batch.child_process import StatusPipe, run_child, setup_logging
from minisgl_batch.distributed.place import FollowerConfig
from minisgl_batch.scheduler.rank import Rank, join


def main(config: FollowerConfig, status: StatusPipe) -> None:
    setup_logging(f"rank {config.place.rank}")
    rank = Rank(config.engine, None, join(config.place))
    try:
        status.ready()
        rank.scheduler.run()
    finally:
        rank.close()


if __name__ == "__main__":
    run_child("rank", FollowerConfig, main)
