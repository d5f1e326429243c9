"""The real frontend, which also notes each row that counts as finished: python -m tests.chaos.noting_frontend.

Its log gets a line `<monotonic seconds> <row>` for each row once Redis has confirmed that it has it, be it in a spool
or in a committed part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from minisgl_batch.child_process import run_child
from minisgl_jobs.leases import ChunkQueue, Commit, Lease
from minisgl_workers import frontend
from minisgl_workers.options import FrontendConfig

LOG = os.environ["MINISGL_TEST_SPOOL_LOG"]


def note(rows: Iterable[int]) -> None:
    now = time.monotonic()
    os.write(_log, "".join(f"{now:.6f} {row}\n" for row in rows).encode())


class NotingQueue(ChunkQueue):
    """A queue that notes what it has confirmed."""

    def spool(self, lease: Lease, results: Mapping[tuple[int, int], bytes], *, num_rows: int) -> bool:
        is_ours = super().spool(lease, results, num_rows=num_rows)
        if is_ours:
            note(row for row, _ in results)
        return is_ours

    def complete(self, lease: Lease, **counts: Any) -> Commit:
        commit = super().complete(lease, **counts)
        if commit is not Commit.STALE:
            note(lease.rows)
        return commit


if __name__ == "__main__":
    _log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    frontend.ChunkQueue = NotingQueue  # type: ignore[misc]
    run_child("frontend", FrontendConfig, frontend.main, frontend.tidy_up)
