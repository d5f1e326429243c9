"""The chunk queue in plain Python: what the scripts must do, one call at a time, without Redis and without a clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from minisgl_jobs.model import JobSpec, JobState

Chunk = tuple[str, int]


@dataclass
class ReferenceJob:
    spec: JobSpec
    state: JobState = JobState.QUEUED
    epoch: int = 0
    next: int = 0
    todo: deque[int] = field(default_factory=deque)
    done: set[int] = field(default_factory=set)
    bad: dict[int, int] = field(default_factory=dict)
    ok: int = 0
    errors: int = 0
    deaths: dict[int, int] = field(default_factory=dict)
    probes: dict[int, range] = field(default_factory=dict)
    suspects: dict[int, range] = field(default_factory=dict)
    row_deaths: dict[int, int] = field(default_factory=dict)
    spools: dict[int, dict[tuple[int, int], bytes]] = field(default_factory=dict)
    committed_by: dict[int, str] = field(default_factory=dict)
    is_canceled: bool = False

    def has_chunks(self) -> bool:
        return bool(self.todo) or self.next < self.spec.num_chunks


class ReferenceQueue:
    """Chunks go to the worker that asks; time passes only when `expire` says so."""

    def __init__(self) -> None:
        self.jobs: dict[str, ReferenceJob] = {}
        self.holders: dict[Chunk, str] = {}
        self.expired: list[Chunk] = []  # in the order in which they expired
        self.new: dict[str, deque[str]] = {}  # priority -> jobs that had no turn yet
        self.served: dict[str, dict[str, int]] = {}  # priority -> job -> its last turn, 0 after a hand-back
        self.last_was_new: dict[str, bool] = {}
        self.outbox: set[str] = set()
        self.held: set[str] = set()
        self.paused = False
        self._turns = 0

    def submit(self, spec: JobSpec) -> None:
        self.hold(spec)
        self.release(spec.job_id)

    def hold(self, spec: JobSpec) -> None:
        self.jobs[spec.job_id] = ReferenceJob(spec)
        self.held.add(spec.job_id)

    def release(self, job_id: str) -> None:
        self.held.remove(job_id)
        spec = self.jobs[job_id].spec
        self.new.setdefault(spec.priority.value, deque()).append(spec.job_id)

    def take(self, token: str) -> Chunk | None:
        taken = self._take_over() or (None if self.paused else self._take_new())
        if taken is not None:
            self.holders[taken] = token
        return taken

    def holds(self, chunk: Chunk, token: str) -> bool:
        return self.holders.get(chunk) == token

    def renew(self, chunk: Chunk, token: str) -> str:
        if not self.holds(chunk, token):
            return "lost"
        if chunk in self.expired:
            self.expired.remove(chunk)
        return "cancel" if self.jobs[chunk[0]].state is JobState.CANCELING else "ok"

    def expire(self, chunk: Chunk) -> None:
        if chunk not in self.expired:
            self.expired.append(chunk)

    def spool(self, chunk: Chunk, token: str, results: dict[tuple[int, int], bytes]) -> bool:
        if not self.holds(chunk, token):
            return False
        spool = self.jobs[chunk[0]].spools.setdefault(chunk[1], {})
        for sample, data in results.items():
            spool.setdefault(sample, data)
        return True

    def probe(self, chunk: Chunk, token: str, rows: range) -> bool:
        if self.holds(chunk, token):
            self.jobs[chunk[0]].probes[chunk[1]] = rows
        return self.holds(chunk, token)

    def complete(self, chunk: Chunk, token: str, ok: int, errors: int) -> str:
        job, number = self.jobs[chunk[0]], chunk[1]
        if not self.holds(chunk, token):
            return "again" if job.committed_by.get(number) == token else "stale"
        self._end_lease(chunk)
        job.spools.pop(number, None)
        job.deaths.pop(number, None)
        job.probes.pop(number, None)
        job.suspects.pop(number, None)
        for row in job.spec.chunk_range(number):
            job.row_deaths.pop(row, None)
        if number in job.bad:
            job.ok -= len(job.spec.chunk_range(number)) - job.bad[number]
            job.errors -= job.bad.pop(number)
        job.ok += ok
        job.errors += errors
        if errors:
            job.bad[number] = errors
        job.done.add(number)
        job.committed_by[number] = token
        self._finalise_if_over(job)
        return "committed"

    def renamed(self, chunk: Chunk, token: str) -> None:
        job = self.jobs[chunk[0]]
        if job.committed_by.get(chunk[1]) == token:
            del job.committed_by[chunk[1]]

    def handback(self, chunk: Chunk, token: str) -> None:
        if not self.holds(chunk, token):
            return
        job, number = self.jobs[chunk[0]], chunk[1]
        self._end_lease(chunk)
        job.probes.pop(number, None)
        if job.state is JobState.CANCELING:
            self._finalise_if_over(job)
            return
        job.todo.appendleft(number)
        priority = job.spec.priority.value
        if job.spec.job_id not in self.new.get(priority, ()):
            self.served.setdefault(priority, {}).setdefault(job.spec.job_id, 0)

    def cancel(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if job.state in (JobState.QUEUED, JobState.RUNNING):
            job.state, job.is_canceled = JobState.CANCELING, True
            self._leave_ring(job)
            self._finalise_if_over(job)
        elif job.state is JobState.CANCELING:
            for chunk in [chunk for chunk in self.expired if chunk[0] == job_id]:
                self._end_lease(chunk)
                self._finalise_if_over(job)

    def retry(self, job_id: str) -> bool:
        job = self.jobs[job_id]
        if job.state is not JobState.PARTIAL:
            return False
        job.state = JobState.QUEUED
        job.epoch += 1
        job.todo.extend(sorted(job.bad))
        job.done -= job.bad.keys()
        self.new.setdefault(job.spec.priority.value, deque()).append(job_id)
        return True

    def finish(self, job_id: str) -> JobState:
        job = self.jobs[job_id]
        self.outbox.remove(job_id)
        job.state = JobState.PARTIAL if job.errors else JobState.FINISHED
        if job.is_canceled:
            job.state = JobState.CANCELED
        job.committed_by.clear()
        job.spools.clear()
        return job.state

    def _take_over(self) -> Chunk | None:
        for chunk in list(self.expired):
            job, number = self.jobs[chunk[0]], chunk[1]
            if job.state is JobState.CANCELING:
                self._end_lease(chunk)
                self._finalise_if_over(job)
            elif not self.paused:
                self.expired.remove(chunk)
                job.deaths[number] = job.deaths.get(number, 0) + 1
                rows = job.probes.pop(number, None)
                if rows is not None:
                    job.suspects[number] = rows
                    if len(rows) == 1:
                        job.row_deaths[rows.start] = job.row_deaths.get(rows.start, 0) + 1
                return chunk
        return None

    def _take_new(self) -> Chunk | None:
        for priority in ("high", "normal", "low"):
            new, served = self.new.get(priority), self.served.setdefault(priority, {})
            if not new and not served:
                continue
            is_new = bool(new) and not (self.last_was_new.get(priority) and served)
            job_id = new.popleft() if new and is_new else min(served, key=lambda id_: (served[id_], id_))
            self.last_was_new[priority] = is_new
            served.pop(job_id, None)
            job = self.jobs[job_id]
            job.state = JobState.RUNNING
            if job.todo:
                chunk = job.todo.popleft()
            else:
                chunk, job.next = job.next, job.next + 1
            if job.has_chunks():
                self._turns += 1
                served[job_id] = self._turns
            return job_id, chunk
        return None

    def _end_lease(self, chunk: Chunk) -> None:
        del self.holders[chunk]
        if chunk in self.expired:
            self.expired.remove(chunk)

    def _leave_ring(self, job: ReferenceJob) -> None:
        priority, job_id = job.spec.priority.value, job.spec.job_id
        self.served.setdefault(priority, {}).pop(job_id, None)
        self.held.discard(job_id)
        if job_id in self.new.get(priority, ()):
            self.new[priority].remove(job_id)

    def _finalise_if_over(self, job: ReferenceJob) -> None:
        held = any(job_id == job.spec.job_id for job_id, _ in self.holders)
        all_done = job.state is JobState.RUNNING and len(job.done) == job.spec.num_chunks
        if all_done or (job.state is JobState.CANCELING and not held):
            job.state = JobState.FINALISING
            self.outbox.add(job.spec.job_id)
