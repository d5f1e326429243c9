"""Chunks between Redis and this group: taken, kept, spooled, written, committed, or given back.

Every duty may fail because Redis is away or the disk is full; it is then tried again, and nothing is lost meanwhile:
finished rows wait here until their chunk is committed. Knows nothing of engines or tokens. Called by the frontend's
loop, which never waits for a duty except on an idle group.
"""

from __future__ import annotations

import logging
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor

from minisgl_batch.errors import OutputError, RedisFullError, RedisUnavailableError
from minisgl_jobs.kept import add_columns
from minisgl_jobs.leases import ChunkQueue, Commit, Lease, Renewal
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.parts import PartInfo, commit_part, output_place, remove_file, write_part
from minisgl_jobs.places import Place
from minisgl_jobs.results import results_to_table
from minisgl_jobs.roots import AllowedRoots
from minisgl_jobs.scripts import redis_errors
from minisgl_jobs.spool import encode_result
from minisgl_jobs.status import WorkerInfo
from minisgl_jobs.tasks import TaskQueue, dispatch_finalise
from minisgl_workers.loading import ChunkLoader
from minisgl_workers.work import ChunkWork

logger = logging.getLogger(__name__)

RENEW_S = 1.0
CANCEL_S = 0.02  # between looks for jobs that were canceled
SPOOL_S = 0.1  # a crash costs the rows that finished since
HEARTBEAT_S = 3.0
FINALISE_S = 5.0  # between looks for jobs whose finalise somebody else should have fired
AWAY_S = 0.5  # between tries while Redis is away
FULL_S = 2.0  # between tries while the disk or Redis is full
IDLE_S = 0.5
LOADING_S = 0.01  # between looks while an idle group waits for a chunk's rows


class Delivery:
    """The chunks of one worker group. For one thread.

    Attributes:
        works: chunks that are not committed, oldest first.
        stopped: chunks whose rows the caller must stop; it empties the list.
        spooled: (chunk, key) of results that are safe in Redis now; the caller empties the list.
    """

    def __init__(
        self,
        queue: ChunkQueue,
        outbox: Outbox,
        tasks: TaskQueue,
        *,
        low_water: int,
        roots: AllowedRoots | None = None,
    ) -> None:
        """
        Args:
            low_water: take chunks while fewer samples than this are unfinished.
            roots: what inputs and outputs may be used; by default all.
        """
        self._loader = ChunkLoader(roots or AllowedRoots())
        self._queue = queue
        self._outbox = outbox
        self._tasks = tasks
        self._low_water = low_water
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parquet")
        self._writing: dict[ChunkWork, Future[Place]] = {}
        self._unconfirmed: list[Lease] = []  # renames that Redis wasn't told of
        self._refused: list[tuple[Lease, str]] = []  # chunks to be given back, and why
        self.works: list[ChunkWork] = []
        self.stopped: list[ChunkWork] = []
        self.spooled: list[tuple[ChunkWork, tuple[int, int]]] = []
        self._due = dict.fromkeys(("redis", "renew", "cancel", "spool", "write", "heartbeat", "finalise"), 0.0)
        self._is_away = False
        self._take_token = secrets.token_hex(16)

    def tick(self, info: WorkerInfo, *, take: bool) -> None:
        """Do all duties that are due; without `take` no chunk is taken."""
        if not self._is_due("redis"):
            return
        try:
            self._renew()
            self._look_for_canceled()
            self._spool()
            self._commit()
            self._heartbeat(info)
            self._fire_finalise()
            self._start_loaded()
            if take:
                self._take()
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

    def announce_part(self, work: ChunkWork, rows: range) -> bool:
        """Before a part of a solo chunk runs: note its rows. False when Redis couldn't be told; try again."""
        try:
            return self._queue.probe(work.lease, rows)
        except RedisUnavailableError as error:
            self._note_away(error)
            return False

    def hand_back(self) -> None:
        """At the end of a drain: give back what isn't complete, with its finished rows spooled."""
        try:
            self._due["spool"] = 0.0
            self._spool()
            self._queue.handback([*(work.lease for work in self.works), *self._loader.leases])
            self._queue.leave()
        except (RedisUnavailableError, RedisFullError) as error:
            logger.warning("%d chunks were not handed back, their leases run out: %s", len(self.works), error)
        self.works.clear()
        self._loader.close()
        self._writer.shutdown()

    # ------------------------------------------------------------- duties

    def _renew(self) -> None:
        if not self._is_due("renew"):
            return
        works, loading = list(self.works), self._loader.leases
        answers = self._queue.renew([*(work.lease for work in works), *loading])
        self._due["renew"] = time.monotonic() + min(RENEW_S, self._queue.lease_s / 3)
        for lease, answer in zip(loading, answers[len(works) :], strict=True):
            if answer is not Renewal.OK:
                self._loader.forget(lease)
            if answer is Renewal.CANCEL:
                self._queue.handback([lease])
                self._due["finalise"] = 0.0
        for work, answer in zip(works, answers[: len(works)], strict=True):
            if answer is Renewal.LOST:
                logger.warning("chunk %d of job %s went to another worker", work.lease.chunk, work.job_id)
                self._drop(work)
            elif answer is Renewal.CANCEL:
                self._give_up(work)

    def _look_for_canceled(self) -> None:
        """Renewals tell of a cancel too, but rows are to stop at once."""
        if not self.works or not self._is_due("cancel"):
            return
        self._postpone("cancel", CANCEL_S)
        canceled = self._queue.canceled({work.job_id for work in self.works})
        for work in [work for work in self.works if work.job_id in canceled]:
            self._give_up(work)

    def _give_up(self, work: ChunkWork) -> None:
        """Stop a canceled job's rows; those that are finished stay. A complete chunk is committed as any other."""
        if work.is_complete:
            return
        try:
            self._spool_work(work)
        except RedisFullError as error:
            logger.warning("finished rows of canceled job %s are kept in memory: %s", work.job_id, error)
            return  # there will be room, or the chunk will be complete
        self._queue.handback([work.lease])
        self._drop(work)
        self._due["finalise"] = 0.0  # this may have been what the job waited for

    def _spool(self) -> None:
        if not self._is_due("spool"):
            return
        try:
            for work in list(self.works):
                if not self._spool_work(work):
                    self._drop(work)
        except RedisFullError as error:
            # The rows stay here until their chunk is on disk and committed, which needs no room in Redis.
            logger.warning("finished rows are kept in memory: %s", error)
            self._postpone("spool", FULL_S)
        else:
            self._postpone("spool", SPOOL_S)

    def _spool_work(self, work: ChunkWork) -> bool:
        """Put finished rows where a crash can't reach them; False when the lease is lost."""
        keys = work.unspooled
        if not keys or (work.is_complete and self._is_due("write")):
            return True  # a complete chunk goes to disk at once
        if not self._queue.spool(work.lease, {key: encode_result(work.results[key]) for key in keys}):
            return False
        work.unspooled = []
        self.spooled.extend((work, key) for key in keys)
        return True

    def _commit(self) -> None:
        for work in self.works:
            if work.is_complete and work not in self._writing and self._is_due("write"):
                self._writing[work] = self._writer.submit(_write, work)
        for work, writing in list(self._writing.items()):
            if writing.done():
                del self._writing[work]
                self._commit_written(work, writing)
        if self._unconfirmed:
            self._queue.renamed(self._unconfirmed)
            self._unconfirmed.clear()

    def _commit_written(self, work: ChunkWork, writing: Future[Place]) -> None:
        """The part is on disk, or could not be written: commit the chunk, or try again later."""
        lease = work.lease
        try:
            pending = writing.result()
        except OutputError as error:
            logger.error("chunk %d of job %s waits, and no chunk is taken: %s", lease.chunk, work.job_id, error)
            self._postpone("write", FULL_S)
            return
        if work.is_stopped:
            _discard(pending)
            return
        rows_ok, rows_error = work.count_rows()
        try:
            commit = self._queue.complete(lease, rows_ok=rows_ok, rows_error=rows_error)
        except RedisUnavailableError:
            self._writing[work] = writing  # it is on disk: only the commit is tried again
            raise
        if commit is Commit.STALE:
            _discard(pending)
            self._drop(work)
            return
        self.works.remove(work)
        self.spooled.extend((work, key) for key in work.unspooled)
        self._due["finalise"] = 0.0
        try:
            commit_part(output_place(lease.spec.output), lease.chunk, lease.epoch, lease.token)
        except OutputError as error:
            logger.error("finalise will do this rename: %s", error)
        else:
            self._unconfirmed.append(lease)

    def _heartbeat(self, info: WorkerInfo) -> None:
        if self._is_due("heartbeat"):
            self._queue.heartbeat(info)
            self._postpone("heartbeat", HEARTBEAT_S)

    def _fire_finalise(self) -> None:
        if self._is_due("finalise"):
            with redis_errors():
                dispatch_finalise(self._outbox, self._tasks)
            self._postpone("finalise", FINALISE_S)

    def _take(self) -> None:
        # A call that got no answer is repeated with its token, or its chunk would wait for the lease to run out.
        avoided = self._loader.avoided
        while self._has_room() and (lease := self._queue.take(self._take_token, avoid=avoided)) is not None:
            self._take_token = secrets.token_hex(16)
            self._loader.start(lease)
        if not self.works and self._loader.leases:
            self._loader.wait(LOADING_S)
            self._start_loaded()

    def _start_loaded(self) -> None:
        """Chunks whose rows are there may run; those that can't be read here go back."""
        works, refused = self._loader.take()
        self.works += works
        self._refused += refused
        while self._refused:
            lease, reason = self._refused[0]
            self._queue.handback([lease], reason=reason)
            self._refused.pop(0)

    def _has_room(self) -> bool:
        loading = self._loader.leases
        if not self._is_due("write") or any(
            lease.is_solo for lease in [*(work.lease for work in self.works), *loading]
        ):
            return False  # nowhere to put results, or a chunk that must be alone
        num_loading = sum(len(lease.rows) * (lease.spec.params.n or 1) for lease in loading)
        return sum(work.num_left for work in self.works) + num_loading < self._low_water

    def _drop(self, work: ChunkWork) -> None:
        work.is_stopped = True
        self.works.remove(work)
        self.stopped.append(work)

    # ------------------------------------------------------------- timing

    def _is_due(self, duty: str) -> bool:
        return time.monotonic() >= self._due[duty]

    def _postpone(self, duty: str, delay_s: float) -> None:
        self._due[duty] = time.monotonic() + delay_s

    def _note_away(self, error: RedisUnavailableError) -> None:
        if not self._is_away:
            logger.warning("%s; finished rows wait in memory", error)
        self._is_away = True
        self._postpone("redis", AWAY_S)


def _discard(pending: Place) -> None:
    try:
        remove_file(pending)
    except OutputError as error:
        logger.warning("finalise will remove this: %s", error)


def _write(work: ChunkWork) -> Place:
    """In the writer's thread: the part of a complete chunk, under its pending name."""
    lease = work.lease
    results = results_to_table(work.results.values(), token_ids=lease.spec.token_ids)
    table = add_columns(results, work.kept, lease.rows.start, lease.spec.kept)
    info = PartInfo(
        job_id=work.job_id,
        chunk=lease.chunk,
        epoch=lease.epoch,
        input_sha256=work.input_sha256,
        num_rows=table.num_rows,
    )
    return write_part(output_place(lease.spec.output), table, info, lease.token)
