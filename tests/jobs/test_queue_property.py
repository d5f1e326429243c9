"""The scripts against a plain Python model, under random calls of living workers, dead ones and impatient users."""

from __future__ import annotations

import os
import secrets
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minisgl_batch.errors import JobStateError
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.leases import ChunkQueue, Lease
from minisgl_jobs.model import JobState, Priority
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from tests.jobs.helpers import make_spec, payload, submit
from tests.jobs.reference_queue import ReferenceQueue

FAR = 4e9  # Unix seconds
LEASE_S = 600.0  # leases expire only when the test says so


class QueueMachine(RuleBasedStateMachine):
    """Every call goes to both queues; their answers and what they then hold must be equal."""

    client: redis.Redis

    @initialize()
    def start(self) -> None:
        self.client.flushdb()
        self.model = model = "model"
        self.jobs = JobQueue(self.client)
        self.workers = [ChunkQueue(self.client, model, f"w{number}", lease_s=LEASE_S) for number in range(3)]
        self.keys = self.workers[0].keys
        self.outbox = Outbox(self.client, self.keys.queue)
        self.reference = ReferenceQueue()
        self.leases: list[Lease] = []  # all there ever were: the lost ones are the zombies'
        self.num_expired = self.num_steps = 0
        self.last_takes: dict[int, Lease] = {}

    @rule(
        num_rows=st.integers(1, 20),
        chunk_rows=st.integers(1, 6),
        priority=st.sampled_from([Priority.HIGH, Priority.NORMAL, Priority.NORMAL, Priority.LOW]),
        is_held=st.sampled_from([False, False, False, True]),
    )
    def submit(self, num_rows: int, chunk_rows: int, priority: Priority, is_held: bool) -> None:
        # Ids that sort alike in every run, so that an example can be repeated.
        job_id = f"job-{len(self.reference.jobs):03}"
        spec = make_spec(num_rows, chunk_rows, job_id=job_id, priority=priority, model=self.model)
        (self.reference.hold if is_held else self.reference.submit)(spec)
        submit(self.jobs, spec, start_at=FAR if is_held else 0.0)
        self.jobs.seal(spec)  # once more: harmless

    @precondition(lambda self: self.reference.held)
    @rule(data=st.data())
    def start_held(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(sorted(self.reference.held))))

    def _release(self, job_id: str) -> None:
        held = HeldJobs(self.client, self.keys.queue)
        assert held.claim() is None
        assert held.start(job_id)  # not yet
        self.client.hset(self.keys.job(job_id), "start_ms", 1)
        assert not held.start(job_id)
        assert not held.start(job_id)
        self.reference.release(job_id)

    @rule(number=st.integers(0, 2), num_takes=st.integers(1, 4))
    def take(self, number: int, num_takes: int) -> None:
        for _ in range(num_takes):
            self._take(number)

    def _take(self, number: int) -> None:
        token = secrets.token_hex(8)
        expected = self.reference.take(token)
        lease = self.workers[number].take(token)
        if lease is None:
            assert expected is None
            return
        assert (lease.spec.job_id, lease.chunk) == expected
        job = self.reference.jobs[lease.spec.job_id]
        assert lease.spec == job.spec
        assert lease.payload == payload(lease.spec, lease.chunk)
        assert lease.epoch == job.epoch
        assert lease.spooled == job.spools.get(lease.chunk, {})
        assert lease.num_deaths == job.deaths.get(lease.chunk, 0)
        assert lease.is_solo == (lease.num_deaths >= 2)
        assert lease.lost_rows == tuple(row for row in lease.rows if job.row_deaths.get(row, 0) >= 2)
        suspect = job.suspects.get(lease.chunk)
        is_lost = suspect is not None and len(suspect) == 1 and suspect.start in lease.lost_rows
        assert lease.suspect == (None if is_lost else suspect)
        self.leases.append(lease)
        self.last_takes[number] = lease

    @rule(number=st.integers(0, 2))
    def repeat_take(self, number: int) -> None:
        last = self.last_takes.get(number)
        if last is not None and self.reference.holds((last.spec.job_id, last.chunk), last.token):
            again = self.workers[number].take(last.token)
            assert again is not None
            assert (again.spec, again.chunk, again.attempt) == (last.spec, last.chunk, last.attempt)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        leases = data.draw(st.lists(self._any_lease(), max_size=4))
        expected = [self.reference.renew((lease.spec.job_id, lease.chunk), lease.token) for lease in leases]
        assert [answer.value for answer in self.workers[0].renew(leases)] == expected

    @precondition(lambda self: self.reference.holders)
    @rule(data=st.data(), number=st.integers(0, 2), is_taken_over=st.booleans())
    def expire(self, data: st.DataObject, number: int, is_taken_over: bool) -> None:
        self._expire(data.draw(st.sampled_from(sorted(self.reference.holders))))
        if is_taken_over:
            self._take(number)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def spool(self, data: st.DataObject) -> None:
        lease = data.draw(self._any_lease())
        samples = st.tuples(st.sampled_from(lease.rows), st.integers(0, 1))
        results = {sample: secrets.token_bytes(4) for sample in data.draw(st.sets(samples, min_size=1))}
        expected = self.reference.spool((lease.spec.job_id, lease.chunk), lease.token, results)
        assert self.workers[0].spool(lease, results, num_rows=len(results)) == expected
        assert self.workers[0].spool(lease, results, num_rows=len(results)) == expected

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def probe(self, data: st.DataObject) -> None:
        lease = data.draw(self._any_lease())
        start = data.draw(st.sampled_from(lease.rows))
        rows = range(start, data.draw(st.integers(start + 1, lease.rows.stop)))
        expected = self.reference.probe((lease.spec.job_id, lease.chunk), lease.token, rows)
        assert self.workers[0].probe(lease, rows) == expected

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), repeat=st.booleans(), confirm=st.booleans())
    def complete(self, data: st.DataObject, repeat: bool, confirm: bool) -> None:
        lease = data.draw(self._any_lease())
        chunk = (lease.spec.job_id, lease.chunk)
        errors = data.draw(st.sampled_from([0, 0, 0, *range(len(lease.rows) + 1)]))
        for _ in range(1 + repeat):
            expected = self.reference.complete(chunk, lease.token, len(lease.rows) - errors, errors)
            answer = self.workers[0].complete(lease, rows_ok=len(lease.rows) - errors, rows_error=errors)
            assert answer.value == expected
        if confirm:
            self.reference.renamed(chunk, lease.token)
            self.workers[0].renamed([lease, lease])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def handback(self, data: st.DataObject) -> None:
        lease = data.draw(self._any_lease())
        self.reference.handback((lease.spec.job_id, lease.chunk), lease.token)
        self.workers[0].handback([lease, lease])

    @precondition(lambda self: self.reference.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.reference.jobs)))
        job = self.reference.jobs[job_id]
        if not job.is_canceled and job.state in (JobState.FINALISING, JobState.FINISHED, JobState.PARTIAL):
            with pytest.raises(JobStateError):
                self.jobs.cancel(job_id)
        else:
            self.reference.cancel(job_id)
            self.jobs.cancel(job_id)

    @precondition(lambda self: self.reference.jobs)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.reference.jobs)))
        if self.reference.retry(job_id):
            self.jobs.retry(job_id)
        else:
            with pytest.raises(JobStateError):
                self.jobs.retry(job_id)

    @rule(paused=st.sampled_from([False, False, False, True]))
    def pause(self, paused: bool) -> None:
        self.reference.paused = paused
        (self.jobs.pause if paused else self.jobs.resume)(self.model)

    @precondition(lambda self: self.reference.outbox)
    @rule()
    def finalise(self) -> None:
        claim = self.outbox.claim(60)
        if claim is not None:  # else it was claimed by `claim_and_die`
            self._finish(claim.job_id, claim.epoch)

    @rule()
    def claim_and_die(self) -> None:
        claim = self.outbox.claim(60)
        if claim is not None:
            assert claim.job_id in self.reference.outbox
            # Its time is over: the next claim gets it again.
            self.client.zadd(self.keys.part("fin"), {claim.job_id: 0}, xx=True)

    @rule()
    def audit(self) -> None:
        assert self.workers[0].audit() == 0

    @invariant()
    def look(self) -> None:
        """All answers are compared at once; what lies in Redis, now and then."""
        self.num_steps += 1
        if self.num_steps % 4 == 0:
            self.equal()

    def equal(self) -> None:
        now_held = {}
        for job_id, job in self.reference.jobs.items():
            status = self.jobs.status(job_id)
            assert status.state is job.state
            assert (status.rows_ok, status.rows_error) == (job.ok, job.errors)
            assert status.chunks_done == len(job.done)
            assert status.epoch == job.epoch
            assert status.is_held == (job_id in self.reference.held)
            now_held.update({(job_id, lease.chunk): lease.num_spooled for lease in status.leases})
            bits: Any = self.client.get(self.keys.job(job_id, "done")) or b""
            done = {8 * i + bit for i, byte in enumerate(bits) for bit in range(8) if byte >> (7 - bit) & 1}
            assert done == job.done
            for chunk, spool in job.spools.items():
                assert self.jobs.spooled(job_id, chunk) == spool
        jobs = self.reference.jobs
        expected = {chunk: len(jobs[chunk[0]].spools.get(chunk[1], {})) for chunk in self.reference.holders}
        assert now_held == expected
        members: Any = self.client.zrange(self.keys.part("lease"), 0, -1)
        assert {tuple(member.decode().split("|")) for member in members} == {(j, str(c)) for j, c in expected}

    def teardown(self) -> None:
        """Whatever happened: when living workers go on, every job ends with each row once."""
        if not hasattr(self, "reference"):
            return
        self.reference.paused = False
        self.jobs.resume(self.model)
        for job_id in sorted(self.reference.held):
            self._release(job_id)
        for chunk in sorted(self.reference.holders):
            self._expire(chunk)
        while (lease := self.workers[0].take()) is not None:
            chunk = (lease.spec.job_id, lease.chunk)
            assert self.reference.take(lease.token) == chunk
            assert self.workers[0].complete(lease, rows_ok=len(lease.rows), rows_error=0).value == "committed"
            self.reference.complete(chunk, lease.token, len(lease.rows), 0)
        self.reference.take("nobody")  # lets go of canceled jobs, as the last take did
        self.equal()
        while (claim := self.outbox.claim(60)) is not None:
            self._finish(claim.job_id, claim.epoch)
        self.equal()
        for job_id, job in self.reference.jobs.items():
            assert job.state.is_final
            if not job.is_canceled:
                assert self.jobs.status(job_id).rows_done == job.spec.num_rows

    def _expire(self, chunk: tuple[str, int]) -> None:
        if chunk not in self.reference.expired:
            self.num_expired += 1
            member = f"{chunk[0]}|{chunk[1]}"
            assert self.client.zadd(self.keys.part("lease"), {member: self.num_expired}, xx=True, ch=True) == 1
            self.reference.expire(chunk)

    def _finish(self, job_id: str, epoch: int) -> None:
        job = self.outbox.load(job_id, epoch)
        assert job is not None
        assert job.renames == {
            chunk: (token, job.renames[chunk][1]) for chunk, token in self.reference.jobs[job_id].committed_by.items()
        }
        state = self.reference.finish(job_id)
        assert job.is_canceled == (state is JobState.CANCELED)
        assert not self.outbox.finish(job_id, epoch + 1, state)
        assert self.outbox.finish(job_id, epoch, state)
        assert not self.outbox.finish(job_id, epoch, state)

    def _any_lease(self) -> st.SearchStrategy[Lease]:
        return st.sampled_from(self.leases[-8:])


def test_scripts_do_what_the_model_does(client: redis.Redis) -> None:
    machine = type("Machine", (QueueMachine,), {"client": client})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("MINISGL_QUEUE_EXAMPLES", "100")),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=checks,
            phases=[Phase.generate],  # shrinking takes minutes: add Phase.shrink to debug
            print_blob=True,
        ),
    )
