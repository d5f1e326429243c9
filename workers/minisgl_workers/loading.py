"""Chunks between their lease and their first row: the rows are read, which may take a while where they aren't at hand.

Reading goes on in two threads: a slow store doesn't hold back the chunks that bring their rows along. A chunk that
can't be read here is given back, and its job left to other workers for a while. Knows nothing of engines. Called by
`delivery`.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from minisgl_batch.errors import InputUnreachableError, OutputError
from minisgl_jobs.leases import Lease
from minisgl_jobs.parts import output_place, part_name, read_part
from minisgl_jobs.places import Place
from minisgl_jobs.references import ChunkReader
from minisgl_jobs.retry import results_to_keep
from minisgl_jobs.roots import AllowedRoots
from minisgl_workers.work import ChunkWork

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 5.0  # before a job that couldn't be read here is tried again
LONGEST_PAUSE_S = 60.0


@dataclass
class _Pause:
    until: float
    length_s: float


class _Reader:
    """A thread, and what it reads with."""

    def __init__(self, roots: AllowedRoots) -> None:
        self._roots = roots
        self._chunks = ChunkReader(roots)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="input")

    def load(self, lease: Lease) -> ChunkWork:
        """In the thread: a chunk with its rows, and with those results that are on disk already."""
        self._roots.check_writing(lease.spec.output)
        folder = output_place(lease.spec.output)
        work = ChunkWork(lease, self._chunks.read(lease.spec, lease.chunk, lease.payload))
        if lease.epoch > 0 or _is_on_disk(folder, lease):
            work.keep(results_to_keep(folder, lease.chunk, work.input_sha256))
        return work

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
        self._chunks.close()


class ChunkLoader:
    """The chunks that are being read. For one thread, beside its own."""

    def __init__(self, roots: AllowedRoots | None = None) -> None:
        """
        Args:
            roots: what inputs and outputs may be used; by default all.
        """
        roots = roots or AllowedRoots()
        self._readers = {is_here: _Reader(roots) for is_here in (True, False)}  # rows in Redis, rows elsewhere
        self._loading: dict[str, tuple[Lease, Future[ChunkWork]]] = {}  # by token
        self._pauses: dict[str, _Pause] = {}

    @property
    def leases(self) -> list[Lease]:
        """Those that are being read."""
        return [lease for lease, _ in self._loading.values()]

    @property
    def avoided(self) -> list[str]:
        """Jobs that couldn't be read here lately, for others to take."""
        now = time.monotonic()
        return [job_id for job_id, pause in self._pauses.items() if now < pause.until]

    def start(self, lease: Lease) -> None:
        """Begin to read a chunk."""
        reader = self._readers[lease.spec.reference is None]
        self._loading[lease.token] = (lease, reader.thread.submit(reader.load, lease))

    def forget(self, lease: Lease) -> bool:
        """Its rows are not wanted any more; False when they aren't being read."""
        loading = self._loading.pop(lease.token, None)
        if loading is not None:
            loading[1].cancel()
        return loading is not None

    def loaded(self) -> tuple[list[ChunkWork], list[tuple[Lease, str]]]:
        """What has been read since the last time, and what couldn't be, with the reason."""
        works, unread = [], []
        for token, (lease, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[token]
            try:
                works.append(future.result())
                self._pauses.pop(lease.spec.job_id, None)
            except (InputUnreachableError, OutputError) as error:
                unread.append((lease, self.avoid(lease, str(error))))
        return works, unread

    def wait(self, timeout_s: float) -> None:
        """Until something has been read."""
        wait([future for _, future in self._loading.values()], timeout_s)

    def close(self) -> None:
        """Read no more."""
        for reader in self._readers.values():
            reader.close()
        self._loading.clear()

    def avoid(self, lease: Lease, reason: str) -> str:
        """Leave the job of a chunk to others for a while; answers the reason."""
        job_id = lease.spec.job_id
        before = self._pauses.get(job_id)
        length_s = FIRST_PAUSE_S if before is None else min(LONGEST_PAUSE_S, 2 * before.length_s)
        self._pauses[job_id] = _Pause(time.monotonic() + length_s, length_s)
        logger.error("job %s is left to other workers for %.0f s: %s", job_id, length_s, reason)
        return reason


def _is_on_disk(folder: Place, lease: Lease) -> bool:
    """Whether the job has a part of this chunk all the same: Redis has lost the last that it was told."""
    path = folder / part_name(lease.chunk)
    try:
        return path.exists() and read_part(path).info.job_id == lease.spec.job_id
    except (OSError, OutputError) as error:
        logger.warning("chunk %d of job %s is generated again: %s", lease.chunk, lease.spec.job_id, error)
        return False
