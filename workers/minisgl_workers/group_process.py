"""A worker group in a child process: its supervisor, which ends with whoever started it, however that ends.

Started by `minisgl-batch run`, and once for each of several groups of a `minisgl-batch worker`.
"""

from __future__ import annotations

import os
import signal
import time

from minisgl_batch.child_process import StatusPipe, run_child
from minisgl_workers.group import run_worker
from minisgl_workers.options import WorkerOptions

MODULE = "minisgl_workers.group_process"
STOP_S = 10.0
BETWEEN_SIGNALS_S = 0.1  # two at once would count as one


def main(options: WorkerOptions, status: StatusPipe) -> None:
    run_worker(options, lambda processes: status.ready(**processes))


def _stop_at_once(_options: WorkerOptions) -> None:
    """As two signals do, so that the group's sockets are removed; what hangs is ended by the lifeline after that."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(BETWEEN_SIGNALS_S)
    time.sleep(STOP_S)


if __name__ == "__main__":
    run_child("worker", WorkerOptions, main, on_orphaned=_stop_at_once)
