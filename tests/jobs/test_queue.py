"""Jobs as clients see them: submit, status, list, cancel, retry, pause, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
import redis

from minisgl_batch.errors import InvalidParameterError, JobNotFoundError, JobStateError, SchemaVersionError
from minisgl_jobs.keys import QUEUES, QueueKeys, queue_name
from minisgl_jobs.leases import ChunkQueue, Renewal
from minisgl_jobs.model import SCHEMA_VERSION, JobState, Priority
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.scripts import Scripts
from minisgl_jobs.status import WorkerInfo, spec_encoder
from tests.jobs.helpers import MODEL, complete, end_all, make_spec, payload, submit, taken


@pytest.fixture
def queue(client: redis.Redis) -> JobQueue:
    return JobQueue(client)


@pytest.fixture
def worker(client: redis.Redis) -> ChunkQueue:
    return ChunkQueue(client, MODEL, "w1")


@pytest.fixture
def outbox(client: redis.Redis) -> Outbox:
    return Outbox(client, queue_name(MODEL))


def test_a_job_from_submit_to_finished(queue: JobQueue, worker: ChunkQueue, outbox: Outbox) -> None:
    spec = make_spec(num_rows=10, chunk_rows=4)
    assert queue.create(spec)
    assert queue.status(spec.job_id).state is JobState.SUBMITTING
    assert worker.take() is None
    queue.append(spec, {chunk: payload(spec, chunk) for chunk in range(3)})
    queue.seal(spec)
    assert queue.status(spec.job_id).state is JobState.QUEUED

    leases = [taken(worker) for _ in range(3)]
    assert [(lease.chunk, lease.rows, lease.payload) for lease in leases] == [
        (chunk, rows, payload(spec, chunk)) for chunk, rows in enumerate([range(4), range(4, 8), range(8, 10)])
    ]
    status = queue.status(spec.job_id)
    assert status.state is JobState.RUNNING
    assert [lease.worker_id for lease in status.leases] == ["w1"] * 3
    assert all(14 < lease.expires_in_s <= 15 for lease in status.leases)

    for lease in leases:
        complete(worker, lease)
    assert queue.status(spec.job_id).state is JobState.FINALISING
    end_all(outbox)
    status = queue.status(spec.job_id)
    assert status.state is JobState.FINISHED
    assert (status.rows_ok, status.rows_error, status.chunks_done, status.leases) == (10, 0, 3, ())
    times = [status.created_at, status.queued_at, status.started_at, status.finished_at]
    assert times == sorted(time for time in times if time is not None)


def test_a_submit_may_be_repeated_at_any_point(queue: JobQueue, worker: ChunkQueue) -> None:
    spec = make_spec()
    later = msgspec.structs.replace(spec, submitted_at=99.0)
    assert queue.create(spec)
    queue.append(spec, {0: payload(spec, 0)})
    assert queue.create(later)
    queue.append(spec, {chunk: payload(spec, chunk) for chunk in range(2)})
    queue.seal(spec)
    assert not queue.create(later)
    queue.append(spec, {0: b"too late"})
    queue.seal(spec)
    assert taken(worker).payload == payload(spec, 0)
    assert taken(worker).chunk == 1
    assert worker.take() is None


def test_another_job_of_the_same_id_is_refused(queue: JobQueue) -> None:
    spec = submit(queue, make_spec())
    with pytest.raises(JobStateError, match="another"):
        queue.create(msgspec.structs.replace(spec, seed=7))


@pytest.mark.parametrize("job_id", ["", "a b", "a|b", "a:b", "../a", "a{b}", "a.b", "x" * 129])
def test_an_id_that_cannot_be_a_name_is_refused(queue: JobQueue, job_id: str) -> None:
    with pytest.raises(InvalidParameterError):
        queue.create(msgspec.structs.replace(make_spec(), job_id=job_id))


def test_a_job_without_rows_is_refused(queue: JobQueue) -> None:
    with pytest.raises(InvalidParameterError):
        queue.create(make_spec(num_rows=0))


def test_a_job_that_lacks_chunks_is_not_sealed(queue: JobQueue, worker: ChunkQueue) -> None:
    spec = make_spec(num_rows=8, chunk_rows=4)
    queue.create(spec)
    queue.append(spec, {1: payload(spec, 1)})
    with pytest.raises(JobStateError, match="lacks rows"):
        queue.seal(spec)
    assert worker.take() is None
    queue.append(spec, {0: payload(spec, 0)})
    queue.seal(spec)
    assert taken(worker).chunk == 0


def test_a_submission_that_nobody_goes_on_with_ends_by_itself(client: redis.Redis) -> None:
    queue = JobQueue(client, submit_ttl_s=0.02)
    spec = make_spec()
    queue.create(spec)
    queue.append(spec, {0: b"x"})
    keys = QueueKeys(queue_name(MODEL))
    ttls = [client.pttl(keys.job(spec.job_id)), client.pttl(keys.job(spec.job_id, "in"))]
    assert all(0 <= ttl <= 20 for ttl in ttls) or ttls == [-2, -2]
    client.delete(keys.job(spec.job_id), keys.job(spec.job_id, "in"))  # as the TTL does
    for call in (lambda: queue.append(spec, {0: b"x"}), lambda: queue.seal(spec), lambda: queue.status(spec.job_id)):
        with pytest.raises(JobNotFoundError):
            call()
    assert queue.jobs() == []


def test_a_large_job_is_few_keys_and_many_appends(client: redis.Redis, queue: JobQueue, worker: ChunkQueue) -> None:
    spec = make_spec(num_rows=1_000_000, chunk_rows=256)
    queue.create(spec)
    queue.append(spec, dict.fromkeys(range(spec.num_chunks), bytes(1000)))
    queue.seal(spec)
    complete(worker, taken(worker))
    assert client.dbsize() <= 14
    assert queue.status(spec.job_id).rows_done == 256
    queue.cancel(spec.job_id)
    end_all(Outbox(client, queue_name(MODEL)))


def test_unknown_jobs(queue: JobQueue) -> None:
    submit(queue, make_spec())
    for call in (queue.status, queue.cancel, queue.retry, queue.find):
        with pytest.raises(JobNotFoundError, match="no-such-job"):
            call("no-such-job")


def test_a_job_of_another_release_is_neither_read_nor_run(client: redis.Redis, queue: JobQueue) -> None:
    ours = make_spec()
    theirs = msgspec.structs.replace(make_spec(), schema_version=SCHEMA_VERSION + 1)
    for spec in (theirs, ours):
        submit(queue, spec)
    with pytest.raises(SchemaVersionError, match="newer"):
        queue.status(theirs.job_id)
    assert [status.job_id for status in queue.jobs()] == [ours.job_id]
    worker = ChunkQueue(client, MODEL, "w1")
    assert [taken(worker).spec.job_id for _ in range(2)] == [ours.job_id] * 2
    assert worker.take() is None
    queue.cancel(theirs.job_id)


def test_jobs_are_listed_newest_first_over_all_models(queue: JobQueue) -> None:
    specs = [submit(queue, make_spec(model=model)) for model in ("a", "b", "a", "c/d")]
    assert {status.job_id for status in queue.jobs()} == {spec.job_id for spec in specs}
    created = [status.created_at for status in queue.jobs()]
    assert created == sorted(created, reverse=True)
    assert {status.job_id for status in queue.jobs(model="a")} == {specs[0].job_id, specs[2].job_id}
    assert len(queue.jobs(limit=2)) == 2
    assert queue.queues() == {queue_name(model): model for model in ("a", "b", "c/d")}


def test_a_job_that_waits_for_the_trouble_of_another_says_so(
    queue: JobQueue, worker: ChunkQueue, client: redis.Redis
) -> None:
    running, waiting = submit(queue, make_spec(4, 4)), submit(queue, make_spec())
    taken(worker)
    worker.heartbeat(WorkerInfo("w1", MODEL, trouble="/a is full"))
    assert queue.status(waiting.job_id).waiting == "w1 takes no chunks: /a is full"
    assert queue.status(running.job_id).waiting == ""
    shown = f"{waiting.job_id}: queued, 0 of {waiting.num_rows} rows done, waiting: w1 takes no chunks: /a is full"
    assert repr(queue.status(waiting.job_id)) == f"<JobStatus of {shown}>"
    worker.heartbeat(WorkerInfo("w2", MODEL))  # which takes some
    assert queue.status(waiting.job_id).waiting == ""
    client.set(worker.keys.worker("w2"), b"damaged")
    assert queue.status(waiting.job_id).waiting == "w1 takes no chunks: /a is full"


def test_a_job_waits_for_a_worker_and_says_so(queue: JobQueue, worker: ChunkQueue) -> None:
    spec = submit(queue, make_spec())
    assert queue.status(spec.job_id).waiting == f"no worker for {MODEL}"
    worker.heartbeat(WorkerInfo("w1", MODEL, host="h", pid=7, since=1.0, tokens_per_s=2.5))
    status = queue.status(spec.job_id)
    assert (status.num_workers, status.waiting) == (1, "")
    assert queue.workers() == queue.workers(model=MODEL) == [WorkerInfo("w1", MODEL, "h", 7, 1.0, 2.5)]
    assert queue.workers(model="other") == []
    queue.pause(MODEL)
    assert queue.status(spec.job_id).waiting == "the queue is paused"
    queue.resume(MODEL)
    worker.leave()
    assert queue.workers() == []
    assert queue.status(spec.job_id).waiting == f"no worker for {MODEL}"


def test_a_paused_queue_hands_out_nothing_but_goes_on_with_what_runs(queue: JobQueue, worker: ChunkQueue) -> None:
    submit(queue, make_spec(num_rows=12, chunk_rows=4))
    lease = taken(worker)
    queue.pause(MODEL)
    assert worker.take() is None
    assert worker.renew([lease]) == [Renewal.OK]
    complete(worker, lease)
    queue.resume(MODEL)
    assert taken(worker).chunk == 1


def test_cancel_lets_workers_wrap_up_and_then_finalises(queue: JobQueue, worker: ChunkQueue, outbox: Outbox) -> None:
    spec = submit(queue, make_spec(num_rows=12, chunk_rows=4))
    done, cut, given_back = (taken(worker) for _ in range(3))
    complete(worker, done)
    queue.cancel(spec.job_id)
    queue.cancel(spec.job_id)
    assert queue.status(spec.job_id).state is JobState.CANCELING
    assert worker.take() is None
    assert worker.renew([cut, given_back]) == [Renewal.CANCEL, Renewal.CANCEL]
    assert worker.complete(cut, rows_ok=1, rows_error=0).value == "committed"  # fewer rows than it has
    worker.handback([given_back])
    assert queue.status(spec.job_id).state is JobState.FINALISING
    end_all(outbox)
    status = queue.status(spec.job_id)
    assert (status.state, status.rows_ok, status.chunks_done) == (JobState.CANCELED, 5, 2)
    queue.cancel(spec.job_id)  # it is canceled: nothing to refuse


def test_cancel_of_a_job_that_nobody_works_on(queue: JobQueue, outbox: Outbox) -> None:
    queued, submitting = submit(queue, make_spec()), make_spec()
    queue.create(submitting)
    for spec in (queued, submitting):
        queue.cancel(spec.job_id)
        assert queue.status(spec.job_id).state is JobState.FINALISING
        queue.cancel(spec.job_id)  # once more: it is being canceled
    end_all(outbox)
    assert queue.status(queued.job_id).state is JobState.CANCELED


def test_retry_runs_only_chunks_with_error_rows(queue: JobQueue, worker: ChunkQueue, outbox: Outbox) -> None:
    spec = submit(queue, make_spec(num_rows=12, chunk_rows=4))
    for rows_error in (0, 3, 1):
        complete(worker, taken(worker), rows_error)
    for refused in (queue.retry, queue.cancel):
        with pytest.raises(JobStateError, match="finalising"):
            refused(spec.job_id)
    end_all(outbox)
    status = queue.status(spec.job_id)
    assert (status.state, status.rows_ok, status.rows_error) == (JobState.PARTIAL, 8, 4)

    queue.retry(spec.job_id)
    with pytest.raises(JobStateError, match="queued"):
        queue.retry(spec.job_id)
    again = [taken(worker), taken(worker)]
    assert [(lease.chunk, lease.epoch, lease.payload) for lease in again] == [
        (chunk, 1, payload(spec, chunk)) for chunk in (1, 2)
    ]
    status = queue.status(spec.job_id)
    assert (status.rows_ok, status.rows_error, status.chunks_done) == (8, 4, 1)  # the old parts are still there
    complete(worker, again[0])
    complete(worker, again[1], rows_error=2)
    end_all(outbox)
    status = queue.status(spec.job_id)
    assert (status.state, status.rows_ok, status.rows_error, status.epoch) == (JobState.PARTIAL, 10, 2, 1)


def test_a_repeated_retry_call_opens_one_epoch(
    client: redis.Redis, queue: JobQueue, worker: ChunkQueue, outbox: Outbox
) -> None:
    spec = submit(queue, make_spec(num_rows=4, chunk_rows=4))
    complete(worker, taken(worker), 1)
    end_all(outbox)
    for _ in range(2):  # what the client library does when the answer to the first got lost
        Scripts(client).run("retry", worker.keys.prefix, spec.job_id, 0)
    assert queue.status(spec.job_id).epoch == 1
    assert taken(worker).epoch == 1
    assert worker.take() is None
    queue.cancel(spec.job_id)


def test_finished_jobs_expire_and_retried_ones_do_not(client: redis.Redis, queue: JobQueue, worker: ChunkQueue) -> None:
    outbox = Outbox(client, queue_name(MODEL))
    spec = submit(queue, make_spec(num_rows=8, chunk_rows=4))
    complete(worker, taken(worker), 1)
    complete(worker, taken(worker))
    claim = outbox.claim(60)
    assert claim is not None
    outbox.finish(claim.job_id, claim.epoch, JobState.PARTIAL, retention_s=50)
    names = [name for name in client.scan_iter() if spec.job_id.encode() in name or name.endswith(b":jobs")]
    assert len(names) == 5
    assert all(0 < client.pttl(name) <= 50_000 for name in names)
    queue.retry(spec.job_id)
    names = [name for name in client.scan_iter() if spec.job_id.encode() in name or name.endswith(b":jobs")]
    assert names
    assert all(client.pttl(name) == -1 for name in names)
    queue.cancel(spec.job_id)


def test_payloads_are_freed_as_the_job_goes(client: redis.Redis, queue: JobQueue, worker: ChunkQueue) -> None:
    spec = submit(queue, make_spec(num_rows=12, chunk_rows=4))
    payloads = QueueKeys(queue_name(MODEL)).job(spec.job_id, "in")
    complete(worker, taken(worker))
    complete(worker, taken(worker), rows_error=1)
    assert client.hkeys(payloads) == [b"1", b"2"]


def test_the_record_holds_what_the_client_submitted(client: redis.Redis, queue: JobQueue) -> None:
    spec = submit(queue, make_spec(priority=Priority.HIGH))
    fields = client.hgetall(QueueKeys(queue_name(MODEL)).job(spec.job_id))
    assert fields[b"spec"] == spec_encoder.encode(spec)
    assert fields[b"schema"] == str(SCHEMA_VERSION).encode()
    assert client.hgetall(QUEUES) == {queue_name(MODEL).encode(): MODEL.encode()}
