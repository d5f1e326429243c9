"""One `run` at a time has a local output folder: each has a Redis of its own, which no other client's jobs are in.

Meanwhile no job is queued or retried for the folder, nor its dataset removed. The lock ends with its process, in
whichever way. Knows nothing of jobs but the name that the folder tells. Called by `run` and by clients.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisgl_batch.errors import OutputTakenError
from minisgl_jobs.owner import output_owner
from minisgl_jobs.places import Place


@contextmanager
def lock_folder(folder: Place, *, alone: bool) -> Iterator[None]:
    """Hold an output folder, one that isn't there or is no local one without effect.

    Args:
        alone: as a run does; else beside others that aren't alone.

    Raises:
        OutputTakenError: another process has it; names its job.
    """
    held = _open_folder(folder) if isinstance(folder, Path) else None
    try:
        if held is not None and not _lock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            owner = output_owner(folder)
            job = f" (job {owner})" if owner else ""
            raise OutputTakenError(f"another run{job} writes to {folder}: wait for its end, or use another folder")
        yield
    finally:
        if held is not None:
            os.close(held)


def _open_folder(folder: Path) -> int | None:
    """The folder; None where that fails, which the output's own checks explain."""
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None


def _lock(descriptor: int, kind: int) -> bool:
    """Whether nobody else's lock forbids it. Where a file system has no such locks, nobody ever has one."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
