"""Writes the parts of complete chunks in a thread, and tries again those that found no room.

Knows nothing of Redis. Owned by `delivery`.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pyarrow as pa

from minisgl_batch.errors import DamagedJobError, OutputDeniedError, OutputError, OutputLostError, OutputNotAllowedError
from minisgl_jobs.dataset import check_dataset
from minisgl_jobs.kept import add_columns
from minisgl_jobs.leases import Lease
from minisgl_jobs.model import EngineInfo
from minisgl_jobs.parts import PartInfo, commit_part, distinct, output_place, remove_file, write_part
from minisgl_jobs.places import Place
from minisgl_jobs.results import results_to_table
from minisgl_jobs.roots import AllowedRoots
from minisgl_workers.work import ChunkWork

logger = logging.getLogger(__name__)

RETRY_S = 2.0
REMIND_S = 60.0  # between log lines about the same trouble
RENAME_THREADS = 4
MAX_UNCOMMITTED = 8  # complete chunks in memory; more are a disk that can't keep up


class PartWriter:
    """Chunks on their way to disk. For one thread.

    A part that can't be written stays, and with it all that come after it. They are tried in turn, since they may be of
    different folders, until one can be written.

    Attributes:
        denied: chunks whose folder can't be written from here, and why; the caller empties the list.
        damaged: chunks whose results no part can hold, such as spooled ones that others have changed, as `denied`.
        lost: chunks whose folder is another job's by now, and what says so; the caller empties the list.
        trouble: why the first of those that wait couldn't be written; "" when none waits.
    """

    def __init__(self, roots: AllowedRoots | None = None, engine: EngineInfo | None = None) -> None:
        """
        Args:
            roots: what may be written, looked at before each part; by default everything.
            engine: what generates the rows here.
        """
        self._engine = engine
        self._roots = roots or AllowedRoots()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parquet")
        self._writing: dict[ChunkWork, Future[Place]] = {}
        self._refused: list[ChunkWork] = []
        self._reason = ""
        self.denied: list[tuple[ChunkWork, str]] = []
        self.damaged: list[tuple[ChunkWork, str]] = []
        self.lost: list[tuple[ChunkWork, str]] = []
        self._retry_at = 0.0
        self._remind_at = 0.0

    @property
    def trouble(self) -> str:
        return self._reason if self._refused else ""

    @property
    def is_behind(self) -> bool:
        """Whether no more chunks should be begun: there is nowhere to put their results, for now."""
        return bool(self._refused) or len(self._writing) >= MAX_UNCOMMITTED

    def write(self, work: ChunkWork) -> None:
        """Write a complete chunk, if this isn't under way."""
        if work in self._writing:
            return
        if self._refused:
            if work not in self._refused:
                self._refused.append(work)
            if work is not self._refused[0] or time.monotonic() < self._retry_at:
                return
        self._writing[work] = self._thread.submit(_write, work, self._engine, self._roots)

    def written(self) -> list[tuple[ChunkWork, Place]]:
        """Chunks that are on disk under their pending names since the last call; each comes once."""
        done = []
        for work, writing in list(self._writing.items()):
            if not writing.done():
                continue
            del self._writing[work]
            try:
                done.append((work, writing.result()))
            except OutputLostError as error:
                self.drop(work)
                self.lost.append((work, str(error)))
            except (OutputDeniedError, OutputNotAllowedError) as error:
                self.drop(work)
                self.denied.append((work, str(error)))
            except OutputError as error:
                self._refuse(work, error)
            except (DamagedJobError, ValueError, TypeError, OverflowError, pa.ArrowException) as error:
                self.drop(work)
                self.damaged.append((work, f"chunk {work.lease.chunk} can't be written: {error}"))
            else:
                if self._refused:
                    logger.info("there is room again: chunks are written and taken")
                    self._refused.clear()
        return done

    def is_refused(self, work: ChunkWork) -> bool:
        """Whether a complete chunk waits for room."""
        return work in self._refused

    def drop(self, work: ChunkWork) -> None:
        """Nobody wants this chunk any more. What is being written comes out of `written` all the same."""
        if work in self._refused:
            self._refused.remove(work)

    def finish(self, timeout_s: float) -> None:
        """Wait for what is being written, and write no more."""
        wait(self._writing.values(), timeout_s)
        self._thread.shutdown(wait=False)

    def _refuse(self, work: ChunkWork, error: OutputError) -> None:
        now = time.monotonic()
        self._retry_at = now + RETRY_S
        self._reason = str(error)
        if now >= self._remind_at:
            self._remind_at = now + REMIND_S
            where = f"chunk {work.lease.chunk} of job {work.job_id}"
            logger.error("%s waits and no chunk is taken until it can be written: %s", where, error)
        self.drop(work)
        if not work.is_stopped:
            self._refused.append(work)


class PartRenamer:
    """Committed parts on their way to their final names, and others on their way out. For one thread.

    What can't be done here, finalise does. An object store takes its time, which must not be the frontend's.
    """

    def __init__(self, roots: AllowedRoots | None = None) -> None:
        """
        Args:
            roots: as `PartWriter`'s.
        """
        self._roots = roots or AllowedRoots()
        self._threads = ThreadPoolExecutor(max_workers=RENAME_THREADS, thread_name_prefix="rename")
        self._renaming: list[tuple[Lease, Future[None]]] = []

    def rename(self, lease: Lease) -> None:
        """Give the part of a committed chunk its name."""
        self._renaming.append((lease, self._threads.submit(_rename, lease, self._roots)))

    def discard(self, pending: Place) -> None:
        """Remove a part that won't be committed."""
        self._threads.submit(_discard, pending)

    def renamed(self) -> list[Lease]:
        """Those whose parts have their names since the last call."""
        done = [(lease, renaming) for lease, renaming in self._renaming if renaming.done()]
        self._renaming = [(lease, renaming) for lease, renaming in self._renaming if not renaming.done()]
        return [lease for lease, renaming in done if _succeeded(renaming)]

    def finish(self, timeout_s: float) -> None:
        """Wait for what is under way, and begin no more."""
        wait([renaming for _, renaming in self._renaming], timeout_s)
        self._threads.shutdown(wait=False)


def _rename(lease: Lease, roots: AllowedRoots) -> None:
    folder = output_place(lease.spec.output, roots)
    check_dataset(folder, lease.spec.job_id)
    commit_part(folder, lease.chunk, lease.epoch, lease.token, roots=roots)


def _succeeded(renaming: Future[None]) -> bool:
    try:
        renaming.result()
    except (OutputError, DamagedJobError) as error:
        logger.error("finalise will do this rename: %s", error)
        return False
    return True


def _discard(pending: Place) -> None:
    try:
        remove_file(pending)
    except OutputError as error:
        logger.warning("finalise will remove this: %s", error)


def _write(work: ChunkWork, engine: EngineInfo | None, roots: AllowedRoots) -> Place:
    """In the writer's thread: the part of a complete chunk, under its pending name."""
    lease = work.lease
    folder = output_place(lease.spec.output, roots)
    check_dataset(folder, work.job_id)
    results = results_to_table(work.results.values(), lease.spec.optional_columns)
    table = add_columns(results, work.kept, lease.rows.start, lease.spec.kept)
    info = PartInfo(
        job_id=work.job_id,
        chunk=lease.chunk,
        epoch=lease.epoch,
        input_sha256=work.input_sha256,
        num_rows=table.num_rows,
        engines=distinct([*work.engines, *([engine] if engine else [])]),
    )
    return write_part(folder, table, info, lease.token, roots=roots)
