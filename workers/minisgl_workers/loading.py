"""Chunks between their lease and their first row: the rows are read, which may take a while where they aren't at hand.

Each job's chunks are read in a thread of their own: a store that is slow, or never answers, holds back its own jobs
only, and not the end of the process. A chunk that can't be read here, or not in time, is given back, and its job left
to other workers for a while. Knows nothing of engines. Called by `delivery`.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from minisgl_batch.errors import InputUnreachableError, OutputError, OutputLostError
from minisgl_jobs.dataset import check_dataset
from minisgl_jobs.leases import Lease
from minisgl_jobs.parts import output_place, part_name, read_part
from minisgl_jobs.places import Place
from minisgl_jobs.references import ChunkReader
from minisgl_jobs.retry import results_to_keep
from minisgl_jobs.roots import AllowedRoots
from minisgl_workers.options import INPUT_S
from minisgl_workers.work import ChunkWork

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 5.0  # before a job that couldn't be read here is tried again
LONGEST_PAUSE_S = 60.0
SLOW_S = 1.0  # a chunk that is read for longer no longer counts as one that is about to run
MAX_IDLE = 4  # readers that are kept, with their open inputs


@dataclass
class _Pause:
    until: float
    length_s: float


class _Reader:
    """A thread, and what it reads with. It is a daemon: nothing waits for one that hangs.

    Attributes:
        job_id: whose chunks it read last.
    """

    def __init__(self, roots: AllowedRoots) -> None:
        self.job_id = ""
        self._roots = roots
        self._chunks = ChunkReader(roots)
        self._asked: SimpleQueue[tuple[Lease, Future[ChunkWork]] | None] = SimpleQueue()
        self._futures: list[Future[ChunkWork]] = []
        self._began: float | None = None
        self._thread = Thread(target=self._run, name="input", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return all(future.done() for future in self._futures)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """For how long it has been at the present chunk."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def load(self, lease: Lease) -> Future[ChunkWork]:
        """Read a chunk after those that were asked for before."""
        self.job_id = lease.spec.job_id
        future: Future[ChunkWork] = Future()
        self._futures = [*(asked for asked in self._futures if not asked.done()), future]
        self._asked.put((lease, future))
        return future

    def close(self) -> None:
        """End once the present chunk is read."""
        for future in self._futures:
            future.cancel()
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            lease, future = asked
            if not future.set_running_or_notify_cancel():
                continue
            self._began = time.monotonic()
            try:
                work = self._load(lease)
            except BaseException as error:  # noqa: BLE001  # it is the asker's
                self._began = None
                future.set_exception(error)
            else:
                self._began = None
                future.set_result(work)
        self._chunks.close()

    def _load(self, lease: Lease) -> ChunkWork:
        """In the thread: a chunk with its rows, and with those results that are on disk already."""
        folder = output_place(lease.spec.output, self._roots)
        check_dataset(folder, lease.spec.job_id)
        work = ChunkWork(lease, self._chunks.read(lease.spec, lease.chunk, lease.payload))
        if lease.epoch > 0 or _is_on_disk(folder, lease):
            work.keep(*results_to_keep(folder, lease.chunk, work.input_sha256))
        return work


class ChunkLoader:
    """The chunks that are being read. For one thread, beside its own.

    Attributes:
        lost: chunks whose job's folder is another job's by now, and what says so; the caller empties the list.
    """

    def __init__(self, roots: AllowedRoots | None = None, *, limit_s: float = INPUT_S) -> None:
        """
        Args:
            roots: what inputs and outputs may be used; by default all.
            limit_s: how long one chunk may be read before it is given back; twice as long after each time that this
                was too short for its job, as it may be where a compressed input is read from its beginning.
        """
        self.lost: list[tuple[Lease, str]] = []
        self._roots = roots or AllowedRoots()
        self._limit_s = limit_s
        self._limits: dict[str, float] = {}  # by job
        self._readers: list[_Reader] = []  # the one used last comes last
        self._stuck: list[_Reader] = []  # given up, and not back yet
        self._loading: dict[str, tuple[Lease, _Reader, Future[ChunkWork]]] = {}  # by token
        self._pauses: dict[str, _Pause] = {}

    @property
    def leases(self) -> list[Lease]:
        """Those that are being read."""
        return [lease for lease, _, _ in self._loading.values()]

    @property
    def imminent(self) -> list[Lease]:
        """Those that are being read without trouble, and will run soon."""
        return [lease for lease, reader, _ in self._loading.values() if reader.busy_s < SLOW_S]

    @property
    def avoided(self) -> list[str]:
        """Jobs that couldn't be read here lately, for others to take, and jobs that are slow to read."""
        now = time.monotonic()
        self._stuck = [reader for reader in self._stuck if reader.is_alive]
        slow = [reader for reader in self._readers if reader.busy_s >= SLOW_S]
        paused = (job_id for job_id, pause in self._pauses.items() if now < pause.until)
        return list(dict.fromkeys([*paused, *(reader.job_id for reader in [*self._stuck, *slow])]))

    def start(self, lease: Lease) -> None:
        """Begin to read a chunk."""
        reader = self._reader(lease.spec.job_id)
        self._loading[lease.token] = (lease, reader, reader.load(lease))

    def forget(self, lease: Lease) -> bool:
        """Its rows are not wanted any more; False when they aren't being read."""
        loading = self._loading.pop(lease.token, None)
        if loading is not None:
            loading[2].cancel()
        return loading is not None

    def loaded(self) -> tuple[list[ChunkWork], list[tuple[Lease, str]], list[tuple[Lease, str]]]:
        """What has been read since the last time, what couldn't be, and what nobody can, with the reasons."""
        works, unread, damaged = [], [], []
        for token, (lease, _, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[token]
            try:
                works.append(future.result())
                self._pauses.pop(lease.spec.job_id, None)
                self._limits.pop(lease.spec.job_id, None)
            except OutputLostError as error:
                self.lost.append((lease, str(error)))
            except (InputUnreachableError, OutputError, OSError, MemoryError) as error:
                unread.append((lease, self.avoid(lease, str(error))))
            except Exception as error:  # one job's records must not end the group, whatever is wrong with them
                logger.debug("chunk %d of job %s", lease.chunk, lease.spec.job_id, exc_info=True)
                damaged.append((lease, f"chunk {lease.chunk}: {type(error).__name__}: {error}"))
        for reader in list(self._readers):
            if reader.busy_s > self._limits.get(reader.job_id, self._limit_s):
                unread += self._give_up(reader)
        return works, unread, damaged

    def wait(self, timeout_s: float) -> None:
        """Until something has been read."""
        wait([future for _, _, future in self._loading.values()], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Read no more; what can't be stopped is not waited for."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()
        self._loading.clear()

    def avoid(self, lease: Lease, reason: str) -> str:
        """Leave the job of a chunk to others for a while; answers the reason."""
        job_id = lease.spec.job_id
        before = self._pauses.get(job_id)
        length_s = FIRST_PAUSE_S if before is None else min(LONGEST_PAUSE_S, 2 * before.length_s)
        self._pauses[job_id] = _Pause(time.monotonic() + length_s, length_s)
        logger.error("job %s is left to other workers for %.0f s: %s", job_id, length_s, reason)
        return reason

    def _reader(self, job_id: str) -> _Reader:
        """The one that reads, or read, this job's chunks; else one that has nothing to do, or a new one."""
        idle = [reader for reader in self._readers if reader.is_idle]
        own = [reader for reader in self._readers if reader.job_id == job_id]
        if not own and len(idle) < MAX_IDLE:
            own = [_Reader(self._roots)]
        reader = (own or idle)[0]
        self._readers = [*(other for other in self._readers if other is not reader), reader]
        for surplus in idle[: max(0, len(idle) - MAX_IDLE)]:
            if surplus is not reader:
                surplus.close()
                self._readers.remove(surplus)
        return reader

    def _give_up(self, reader: _Reader) -> list[tuple[Lease, str]]:
        """Leave a reader that doesn't get on; answers its chunks, to be given back, with the reason."""
        limit_s = self._limits.get(reader.job_id, self._limit_s)
        self._limits[reader.job_id] = 2 * limit_s
        self._readers.remove(reader)
        self._stuck.append(reader)
        reader.close()
        leases = [lease for lease, of, _ in self._loading.values() if of is reader]
        for lease in leases:
            del self._loading[lease.token]
        if not leases:  # they are canceled, or went to others
            return []
        spec = leases[0].spec
        what = spec.output if spec.reference is None else spec.reference.uri
        reason = self.avoid(leases[0], f"{what} can't be read: no answer within {limit_s:.0f} s")
        return [(lease, reason) for lease in leases]


def _is_on_disk(folder: Place, lease: Lease) -> bool:
    """Whether the job has a part of this chunk all the same: Redis has lost the last that it was told."""
    path = folder / part_name(lease.chunk)
    try:
        return path.exists() and read_part(path).info.job_id == lease.spec.job_id
    except (OSError, OutputError) as error:
        logger.warning("chunk %d of job %s is generated again: %s", lease.chunk, lease.spec.job_id, error)
        return False
