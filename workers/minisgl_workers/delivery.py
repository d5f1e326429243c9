"""Chunks between Redis and this group: taken, kept, spooled, written, committed, or given back.

Every duty may fail because Redis is away or full, or the disk is full; it is then tried again, and nothing is lost
meanwhile: finished rows wait here until their chunk is committed, and no more chunks are taken. Knows nothing of
engines or tokens. Called by the frontend's loop, which never waits for a duty except on an idle group.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from minisgl_batch.errors import RedisFullError, RedisUnavailableError
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.leases import ChunkQueue, Commit, Lease, Renewal
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.places import Place
from minisgl_jobs.roots import AllowedRoots
from minisgl_jobs.scripts import redis_errors
from minisgl_jobs.spool import encode_result
from minisgl_jobs.status import WorkerInfo
from minisgl_jobs.tasks import TaskQueue, dispatch_finalise, dispatch_starts
from minisgl_workers.lease_keeper import LeaseKeeper
from minisgl_workers.loading import ChunkLoader
from minisgl_workers.options import INPUT_S
from minisgl_workers.part_writer import PartRenamer, PartWriter
from minisgl_workers.work import ChunkWork

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")

CANCEL_S = 0.02  # between looks for jobs that were canceled
SPOOL_S = 0.1  # a crash costs the rows that finished since
HEARTBEAT_S = 3.0
TASKS_S = 1.0  # between looks for jobs that are to be started, or whose finalise somebody else should have fired
AWAY_S = 0.5  # between tries while Redis is away
FULL_S = 2.0  # between tries while Redis is full
IDLE_S = 0.5
PREFETCH_S = 0.02  # between chunks that are taken ahead, so that idle groups get theirs first
LOADING_S = 0.01  # between looks while an idle group waits for a chunk's rows
LAST_WRITES_S = 5.0


class Delivery:
    """The chunks of one worker group. For one thread.

    Attributes:
        works: chunks that are not committed, oldest first.
        stopped: chunks whose rows the caller must stop; it empties the list.
        spooled: (chunk, key) of results that are safe in Redis now; the caller empties the list.
        trouble: why complete chunks wait and no more are taken; "" when all is well.
    """

    def __init__(
        self,
        queue: ChunkQueue,
        keeper: LeaseKeeper,
        outbox: Outbox,
        tasks: TaskQueue,
        *,
        low_water: int,
        roots: AllowedRoots | None = None,
        input_s: float = INPUT_S,
    ) -> None:
        """
        Args:
            keeper: renews the leases.
            low_water: take chunks while fewer samples than this are unfinished; half of them are taken ahead.
            roots: what inputs and outputs may be used; by default all.
            input_s: as `WorkerOptions`'.
        """
        self._queue = queue
        self._keeper = keeper
        self._outbox = outbox
        self._tasks = tasks
        self._held = HeldJobs(tasks.connection, outbox.queue)
        self._low_water = low_water
        self._loader = ChunkLoader(roots, limit_s=input_s)
        self._writer = PartWriter(roots, queue.engine)
        self._renamer = PartRenamer(roots)
        self._written: list[tuple[ChunkWork, Place]] = []  # on disk, to be committed
        self._unconfirmed: list[Lease] = []  # renames that Redis wasn't told of
        self._unusable: list[tuple[Lease, str]] = []  # chunks that can't be read or written here, and why
        self._damaged: list[tuple[Lease, str]] = []  # chunks whose records nobody can use
        self.works: list[ChunkWork] = []
        self.stopped: list[ChunkWork] = []
        self.spooled: list[tuple[ChunkWork, tuple[int, int]]] = []
        self._due = dict.fromkeys(("redis", "prefetch", "cancel", "spool", "heartbeat", "tasks"), 0.0)
        self._is_away = False
        self._is_full = False
        self._take_token = secrets.token_hex(16)

    @property
    def trouble(self) -> str:
        return self._writer.trouble

    def tick(self, info: WorkerInfo, *, take: bool) -> None:
        """Do all duties that are due; without `take` no chunk is taken."""
        if not self._is_due("redis"):
            return
        duties: list[Callable[[], None]] = [
            self._hear,
            self._look_for_canceled,
            self._spool,
            self._commit,
            partial(self._heartbeat, info),
        ]
        duties += [self._fire_tasks, self._begin_loaded, *([self._take] if take else [])]
        try:
            for duty in duties:
                self._do(duty)
        except RedisUnavailableError as error:
            self._note_away(error)
        else:
            if self._is_away:
                logger.info("Redis is back")
            self._is_away = False

    def wait_for_work(self) -> None:
        """On an idle group: sleep until there may be a chunk to take, for half a second at most."""
        if self._loader.leases:
            self._loader.wait(LOADING_S)
            return
        try:
            self._queue.wait_for_work(IDLE_S)
        except RedisUnavailableError as error:
            self._note_away(error)
            time.sleep(AWAY_S)

    def holds(self, work: ChunkWork) -> bool:
        """Whether rows of the chunk may be started: nobody else can have it at this moment."""
        return self._keeper.holds(work.lease)

    def announce_part(self, work: ChunkWork, rows: range) -> bool:
        """Before a part of a solo chunk runs: note its rows. False when Redis couldn't be told; try again."""
        try:
            return self._queue.probe(work.lease, rows)
        except RedisUnavailableError as error:
            self._note_away(error)
            return False

    def hand_back(self) -> None:
        """At the end of a drain: commit what is complete, and give the rest back with its finished rows spooled."""
        try:
            self._commit()
            self._writer.finish(LAST_WRITES_S)
            self._commit_written()
            self._renamer.finish(LAST_WRITES_S)
            self._queue.renamed(self._renamer.renamed())
            for work in self.works:
                self._spool_work(work)
            unusable = (lease for lease, _ in self._unusable)
            self._queue.handback([*(work.lease for work in self.works), *self._loader.leases, *unusable])
            self._queue.leave()
        except (RedisUnavailableError, RedisFullError) as error:
            logger.warning("%d chunks were not handed back, their leases run out: %s", len(self.works), error)
        self.works.clear()
        self._loader.close()
        self._keeper.stop()

    # ------------------------------------------------------------- duties

    def _do(self, duty: Callable[[], None]) -> None:
        """Do a duty. What a full Redis refuses is due again by itself, and must not keep the others from theirs."""
        try:
            duty()
        except RedisFullError as error:
            if not self._is_full:
                logger.warning(
                    "%s; no chunk is taken until those under way (%d) are on disk; finished rows wait in memory",
                    error,
                    len(self.works),
                )
            self._is_full = True

    def _hear(self) -> None:
        """Of leases that are lost, of canceled jobs, and of a Redis that may have lost its last writes."""
        self._keeper.look_for_pause()
        by_token = {work.lease.token: work for work in self.works}
        for lease, renewal in self._keeper.news():
            work = by_token.get(lease.token)
            if work is None and self._loader.forget(lease):
                self._keeper.remove(lease)
                self._queue.handback([lease])  # a lost one is passed over
                self._due["tasks"] = 0.0
            if work is None or work.is_stopped:
                continue
            if renewal is Renewal.LOST:
                logger.warning("chunk %d of job %s went to another worker", lease.chunk, work.job_id)
                self._drop(work)
            else:
                self._give_up(work)
        if self._keeper.saw_another_server():
            for work in self.works:
                work.spool_again()

    def _look_for_canceled(self) -> None:
        """Renewals tell of a cancel too, but rows are to stop at once."""
        if not self.works or not self._is_due("cancel"):
            return
        self._postpone("cancel", CANCEL_S)
        canceled = self._queue.canceled({work.job_id for work in self.works})
        for work in [work for work in self.works if work.job_id in canceled]:
            self._give_up(work)

    def _give_up(self, work: ChunkWork) -> None:
        """Stop a canceled job's rows; those that are finished stay.

        A complete chunk is committed as any other, unless it can't be written: the job's end is not to wait for that.
        """
        if work.is_complete and not self._writer.is_refused(work):
            return
        try:
            self._spool_work(work)
        except RedisFullError as error:
            logger.warning("finished rows of canceled job %s are kept in memory: %s", work.job_id, error)
            self.stopped.append(work)
            return  # there will be room
        self._queue.handback([work.lease])
        self._drop(work)
        self._due["tasks"] = 0.0  # this may have been what the job waited for

    def _spool(self) -> None:
        if not self._is_due("spool"):
            return
        self._postpone("spool", FULL_S)
        for work in list(self.works):
            # A complete chunk goes to disk at once, unless it has to wait.
            if (not work.is_complete or self._writer.is_behind) and not self._spool_work(work):
                self._drop(work)
        self._postpone("spool", SPOOL_S)

    def _spool_work(self, work: ChunkWork) -> bool:
        """Put finished rows where a crash can't reach them, and tell of those on disk; False when the lease is lost."""
        keys, num_rows = work.unspooled, work.num_finished
        if not keys and num_rows == work.num_told:
            return True
        results = {key: encode_result(work.results[key]) for key in keys}
        if not self._queue.spool(work.lease, results, num_rows=num_rows):
            return False
        self._is_full = False
        work.unspooled, work.num_told = [], num_rows
        self.spooled.extend((work, key) for key in keys)
        return True

    def _commit(self) -> None:
        for work in self.works:
            if work.is_complete and not work.is_written:
                self._writer.write(work)
        self._commit_written()
        self._unconfirmed += self._renamer.renamed()
        if self._unconfirmed:
            self._queue.renamed(self._unconfirmed)
            self._unconfirmed.clear()

    def _commit_written(self) -> None:
        for work, path in self._writer.written():
            work.is_written = True
            self._written.append((work, path))
        self._pass_on()
        for work, path in _in_turn(self._written):
            self._commit_part(work, path)

    def _pass_on(self) -> None:
        """Chunks whose folder can't be written from here go back with their results, for workers that can.

        Those whose results can't be written at all end their job.
        """
        for work, reason in _in_turn(self._writer.damaged):
            if not work.is_stopped:
                self._queue.fail(work.job_id, reason)
                self._drop(work)
        for work, reason in _in_turn(self._writer.denied):
            if not work.is_stopped:
                if self._spool_work(work):
                    self._unusable.append((work.lease, self._loader.avoid(work.lease, reason)))
                self._drop(work)

    def _commit_part(self, work: ChunkWork, pending: Place) -> None:
        """A part is on disk: commit its chunk."""
        lease = work.lease
        if work.is_stopped:
            self._renamer.discard(pending)
            return
        try:
            rows_ok, rows_error = work.count_rows()
            commit = self._queue.complete(lease, rows_ok=rows_ok, rows_error=rows_error)
        except ValueError as error:  # spooled results of other rows, or counts that were changed
            self._queue.fail(work.job_id, str(error))
            commit = Commit.STALE
        if commit is Commit.STALE:
            self._renamer.discard(pending)
            self._drop(work)
            return
        self._let_go(work)
        self.spooled.extend((work, key) for key in work.unspooled)
        self._due["tasks"] = 0.0
        self._renamer.rename(lease)

    def _heartbeat(self, info: WorkerInfo) -> None:
        if self._is_due("heartbeat"):
            self._queue.heartbeat(info)
            self._postpone("heartbeat", HEARTBEAT_S)

    def _fire_tasks(self) -> None:
        if self._is_due("tasks"):
            self._postpone("tasks", TASKS_S)
            with redis_errors():
                dispatch_finalise(self._outbox, self._tasks)
                dispatch_starts(self._held, self._tasks)

    def _take(self) -> None:
        # A call that got no answer is repeated with its token, or its chunk would wait for the lease to run out.
        while self._has_room():
            asked = time.monotonic()
            lease = self._queue.take(self._take_token, avoid=self._loader.avoided)
            if lease is None:
                break
            self._take_token = secrets.token_hex(16)
            self._postpone("prefetch", PREFETCH_S)
            self._keeper.add(lease, asked)
            self._loader.start(lease)
        if not self.works and self._loader.leases:
            self._loader.wait(LOADING_S)
            self._begin_loaded()

    def _begin_loaded(self) -> None:
        """Chunks whose rows have been read may run; those that can't be read here go back."""
        works, unread, damaged = self._loader.loaded()
        self.works += works
        self._unusable += unread
        self._damaged += damaged
        for lease, reason in _in_turn(self._damaged):
            self._queue.fail(lease.spec.job_id, reason)
            self._keeper.remove(lease)
        self._end_lost()
        for lease, reason in _in_turn(self._unusable):
            self._queue.handback([lease], reason=reason)
            self._keeper.remove(lease)

    def _end_lost(self) -> None:
        """Jobs whose folder another job has by now are over."""
        for work, reason in self._writer.lost:
            if not work.is_stopped:
                self._loader.lost.append((work.lease, reason))
                self._drop(work)
        self._writer.lost.clear()
        for lease, reason in _in_turn(self._loader.lost):
            self._queue.give_up(lease, reason)
            self._keeper.remove(lease)
            self._due["tasks"] = 0.0

    def _has_room(self) -> bool:
        if not self.works:
            self._is_full = False
        loading = self._loader.imminent
        is_solo = any(lease.is_solo for lease in [*loading, *(work.lease for work in self.works)])
        if self._is_full or self._writer.is_behind or is_solo:
            return False  # nowhere to put results, or a chunk that must be alone
        num_loading = sum(len(lease.rows) * (lease.spec.params.n or 1) for lease in loading)
        num_left = sum(work.num_left for work in self.works) + num_loading
        return num_left < (self._low_water if self._is_due("prefetch") else self._low_water // 2)

    def _drop(self, work: ChunkWork) -> None:
        self._let_go(work)
        work.is_stopped = True
        self._writer.drop(work)
        self.stopped.append(work)

    def _let_go(self, work: ChunkWork) -> None:
        self.works.remove(work)
        self._keeper.remove(work.lease)
        if not self.works:
            self._due["heartbeat"] = 0.0  # nobody is to take an idle group for a busy one

    # ------------------------------------------------------------- timing

    def _is_due(self, duty: str) -> bool:
        return time.monotonic() >= self._due[duty]

    def _postpone(self, duty: str, delay_s: float) -> None:
        self._due[duty] = time.monotonic() + delay_s

    def _note_away(self, error: RedisUnavailableError) -> None:
        if not self._is_away:
            logger.warning("%s; no chunk is taken, finished rows wait in memory", error)
        self._is_away = True
        self._postpone("redis", AWAY_S)


def _in_turn(waiting: list[_Item]) -> Iterator[_Item]:
    """Each, which leaves the list only when it has been dealt with: when Redis is away or full it is tried again."""
    while waiting:
        yield waiting[0]
        del waiting[0]
