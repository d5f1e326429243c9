"""Jobs as clients see them: submit, look, stop, retry.

Knows the scripts and their answers, but nothing of rows, chunks' contents or results. Called by clients and the command
line; `leases.py` is the worker groups' side of the same queue.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import redis

from minisgl_batch.errors import (
    DamagedJobError,
    InvalidParameterError,
    JobExistsError,
    JobNotFoundError,
    JobStateError,
    SchemaVersionError,
)
from minisgl_jobs.keys import QUEUES, QueueKeys, is_job_id, queue_name
from minisgl_jobs.model import JobSpec, JobState
from minisgl_jobs.scripts import Scripts, redis_errors
from minisgl_jobs.spool import decode_spool
from minisgl_jobs.status import JobStatus, WorkerInfo, decode_worker, parse_status, reading_record, spec_encoder

logger = logging.getLogger(__name__)

SUBMIT_TTL_S = 3600.0  # how long a job that nobody goes on submitting is kept
LOOK_S = 30.0  # between looks at a held job of which nobody has said that it may start
MAX_APPEND_BYTES = 4 << 20
MAX_APPEND_CHUNKS = 500  # Lua can't unpack many more arguments than these twice


class JobQueue:
    """All queues of one Redis.

    Methods raise RedisUnavailableError when Redis stays away; each may then be repeated without harm. Those that look
    at one job raise DamagedJobError when others have written to its keys; lists leave such records out with a warning.
    """

    def __init__(self, client: redis.Redis, *, submit_ttl_s: float = SUBMIT_TTL_S) -> None:
        self._client = client
        self._scripts = Scripts(client)
        self._submit_ttl_ms = int(submit_ttl_s * 1000)
        self._left_out: set[str] = set()  # what was said about records that can't be read

    def create(self, spec: JobSpec, *, epoch: int = 0) -> bool:
        """Make the record of a job; `append` and `seal` follow.

        Args:
            epoch: of the first parts that it writes; 0 unless it is resumed.

        Returns:
            Whether the job is being submitted; False when the same job was submitted before and needs no more rows.

        Raises:
            InvalidParameterError: the job has no rows, or its id can't be a name.
            JobExistsError: another job has this id.
            RedisFullError: there is no room for new jobs.
        """
        _check_spec(spec)
        keys = QueueKeys(queue_name(spec.model))
        with reading_record(QUEUES), redis_errors():
            self._client.hset(QUEUES, keys.queue, spec.model)
        fields: dict[str, str | bytes | int] = {
            "spec": spec_encoder.encode(spec),
            "schema": spec.schema_version,
            "priority": spec.priority.value,
            "rows": spec.num_rows,
            "chunk_rows": spec.chunk_rows,
            "num_chunks": spec.num_chunks,
            "epoch": epoch,
            **dict.fromkeys(("next", "done", "ok", "errors"), 0),
        }
        flat = [item for field in fields.items() for item in field]
        answer = self._scripts.run("create", keys.prefix, spec.job_id, _digest(spec), self._submit_ttl_ms, *flat)
        if answer == b"taken":
            raise JobExistsError(f"job {spec.job_id} exists and is another one: give this job another id")
        return bool(answer != b"sealed")

    def adopt(self, spec: JobSpec, done: Mapping[int, int]) -> None:
        """Mark chunks as done before a job is sealed: chunk -> error rows in its part.

        Chunks without error rows need no payload.

        Raises:
            JobNotFoundError: the job wasn't created, or waited too long.
        """
        prefix = QueueKeys(queue_name(spec.model)).prefix
        chunks = list(done.items())
        for start in range(0, len(chunks), MAX_APPEND_CHUNKS):
            flat = [number for pair in chunks[start : start + MAX_APPEND_CHUNKS] for number in pair]
            if self._scripts.run("adopt", prefix, spec.job_id, self._submit_ttl_ms, *flat) == b"gone":
                raise _ended(spec.job_id)

    def append(self, spec: JobSpec, payloads: Mapping[int, bytes]) -> None:
        """Add payloads of chunks; any order, and a chunk may be given again.

        Raises:
            JobNotFoundError: the job wasn't created, or waited too long.
            RedisFullError: there is no room; seal nothing, and wait or give up.
        """
        prefix = QueueKeys(queue_name(spec.model)).prefix
        for flat in _calls(payloads):
            if self._scripts.run("append", prefix, spec.job_id, self._submit_ttl_ms, *flat) == b"gone":
                raise _ended(spec.job_id)

    def seal(self, spec: JobSpec, *, after: str = "", start_at: float = 0.0) -> None:
        """Let the job run: all of its chunks were appended. A job that was sealed before stays as it is.

        Args:
            spec: the job.
            after: hold it until this job has ended; see `held.py`.
            start_at: hold it until then, Unix seconds of the server's clock.

        Raises:
            JobNotFoundError: the job wasn't created, or waited too long.
            JobStateError: chunks are missing; append them and seal again.
        """
        prefix = QueueKeys(queue_name(spec.model)).prefix
        answer = self._scripts.run("seal", prefix, spec.job_id, after, int(start_at * 1000), int(LOOK_S * 1000))
        if answer == b"gone":
            raise _ended(spec.job_id)
        if answer == b"incomplete":
            raise JobStateError(f"job {spec.job_id} lacks rows: append all chunks before the job is sealed")

    def drop(self, spec: JobSpec) -> None:
        """Forget a job whose submission is given up; one that was sealed stays as it is."""
        self._scripts.run("drop", QueueKeys(queue_name(spec.model)).prefix, spec.job_id)

    def status(self, job_id: str) -> JobStatus:
        """All that is known about a job.

        Raises:
            JobNotFoundError: there is no such job (any more).
            SchemaVersionError: another release wrote it.
        """
        keys = self.find(job_id)
        with reading_record(keys.job(job_id)):
            reply = self._scripts.run("status", keys.prefix, job_id)
            if not reply:
                raise _ended(job_id)
            return parse_status(job_id, reply)

    def jobs(self, *, model: str | None = None, limit: int = 100) -> list[JobStatus]:
        """The newest jobs, of one model or of all, newest first; those of other releases are left out."""
        found = []
        for queue in [queue_name(model)] if model else self.queues():
            keys = QueueKeys(queue)
            ids: list[bytes] = []
            with self._leaving_out(keys.part("jobs")):
                ids = self._scripts.run("list", keys.prefix, limit)
            for job_id in ids:
                with self._leaving_out(keys.job(job_id.decode(errors="backslashreplace"))):
                    if reply := self._scripts.run("status", keys.prefix, job_id):
                        found.append(parse_status(job_id.decode(), reply))
        return sorted(found, key=lambda status: status.created_at, reverse=True)[:limit]

    @contextmanager
    def _leaving_out(self, key: str) -> Iterator[None]:
        """Go on without a record that can't be read; warn of it, once however often it is looked at."""
        try:
            with reading_record(key):
                yield
        except (SchemaVersionError, DamagedJobError) as error:
            if str(error) not in self._left_out:
                self._left_out.add(str(error))
                logger.warning("not listed: %s", error)

    def cancel(self, job_id: str, why: str = "") -> None:
        """Stop a job: nothing new of it starts, and rows that run are given up. Finished rows stay.

        Calling it again is harmless, and ends leases of workers that have died meanwhile.

        Args:
            job_id: the job.
            why: what its status will say, unless a user wished it.

        Raises:
            JobNotFoundError: there is no such job (any more).
            JobStateError: it has ended, or all of its rows are done.
        """
        before = JobState(self._run("cancel", job_id, why).decode())
        if before is JobState.FINALISING or (before.is_final and before is not JobState.CANCELED):
            raise JobStateError(f"job {job_id} can't be canceled: it is {before.value}")

    def retry(self, job_id: str) -> None:
        """Run the chunks with error rows of a partial job again.

        Raises:
            JobNotFoundError: there is no such job (any more).
            JobStateError: the job isn't partial.
        """
        epoch = self.status(job_id).epoch
        before, epoch_before = self._run("retry", job_id, epoch)
        # A call that is repeated by the client library finds the epoch that it has opened itself.
        if before != b"partial" and int(epoch_before) == epoch:
            raise JobStateError(f"job {job_id} can't be retried: it is {before.decode()}, not partial")

    def fail(self, job_id: str, why: str) -> None:
        """Take a job out of the queue whose records are damaged: it has ended then."""
        self._scripts.run("fail", self.find(job_id).prefix, job_id, why)

    def purge(self, job_id: str) -> None:
        """Forget a job that has ended, before its keys expire by themselves. Its dataset stays.

        Raises:
            JobNotFoundError: there is no such job (any more).
            JobStateError: it hasn't ended.
        """
        state = JobState(self._run("purge", job_id).decode())
        if not state.is_final:
            raise JobStateError(f"job {job_id} is {state.value}: cancel it before it is purged")

    def pause(self, model: str) -> bool:
        """Hand out nothing more of a model's queue; what runs goes on. Tells whether the queue was ever used."""
        keys = QueueKeys(queue_name(model))
        with redis_errors():
            self._client.set(keys.part("paused"), 1)
            return bool(self._client.hexists(QUEUES, keys.queue))

    def resume(self, model: str) -> bool:
        """End a pause; workers notice at once. Tells whether the queue was paused."""
        keys = QueueKeys(queue_name(model))
        with redis_errors():
            was_paused = bool(self._client.delete(keys.part("paused")))
        self._scripts.run("ring", keys.prefix)
        return was_paused

    def workers(self, *, model: str | None = None) -> list[WorkerInfo]:
        """The living worker groups, of one model or of all."""
        found = []
        for queue in [queue_name(model)] if model else self.queues():
            for key, info in self._registrations(QueueKeys(queue)):
                with self._leaving_out(key.decode(errors="backslashreplace")):
                    found.append(decode_worker(info))
        return found

    def _registrations(self, keys: QueueKeys) -> list[tuple[bytes, bytes]]:
        """The keys of a queue's workers and what they hold."""
        names: list[Any] = []
        infos: Any = []
        with self._leaving_out(keys.part("workers")), redis_errors():
            ids: Any = self._client.zrange(keys.part("workers"), 0, -1)
            names = [keys.worker("").encode() + id_ for id_ in ids]
            infos = self._client.mget(names) if names else []
        return [(name, info) for name, info in zip(names, infos, strict=True) if info is not None]

    def queues(self) -> dict[str, str]:
        """Queue -> model of all queues that ever had a job or a worker."""
        with reading_record(QUEUES), redis_errors():
            found: dict[Any, Any] = self._client.hgetall(QUEUES)
        queues = {}
        for queue, model in found.items():
            with self._leaving_out(f"{QUEUES} (field {queue.decode(errors='backslashreplace')})"):
                queues[queue.decode()] = model.decode()
        return queues

    def spooled(self, job_id: str, chunk: int) -> dict[tuple[int, int], bytes]:
        """(row, sample) -> encoded result of a chunk that is being worked on."""
        with redis_errors():
            fields: dict[Any, Any] = self._client.hgetall(self.find(job_id).spool(job_id, chunk))
        return decode_spool(fields.items())

    def handed_back(self, job_id: str) -> set[int]:
        """Chunks that nobody works on (any more) and that may have spooled results."""
        with redis_errors():
            chunks: Any = self._client.lrange(self.find(job_id).job(job_id, "todo"), 0, -1)
        return {int(chunk) for chunk in chunks}

    def find(self, job_id: str) -> QueueKeys:
        """The keys of the queue that has a job.

        Raises:
            JobNotFoundError: none has.
        """
        if not is_job_id(job_id):  # it could name another key
            raise JobNotFoundError(f"no job {job_id[:200]!r}: an id is up to 128 letters, digits, '_' and '-'")
        # There are few queues, and asking them all can't be out of date as an index of jobs could.
        queues = [QueueKeys(queue) for queue in self.queues()]
        with redis_errors():
            pipeline = self._client.pipeline(transaction=False)
            for keys in queues:
                pipeline.exists(keys.job(job_id))
            for keys, found in zip(queues, pipeline.execute(), strict=True):
                if found:
                    return keys
        raise JobNotFoundError(f"no job {job_id}: list them with `minisgl-batch jobs` (finished jobs expire)")

    def _run(self, script: str, job_id: str, *args: str | int) -> Any:
        keys = self.find(job_id)
        with reading_record(keys.job(job_id)):
            answer = self._scripts.run(script, keys.prefix, job_id, *args)
        if answer is None:
            raise _ended(job_id)
        return answer


def _check_spec(spec: JobSpec) -> None:
    if not is_job_id(spec.job_id):
        raise InvalidParameterError("job_id", f"must be up to 128 letters, digits, '_' and '-', got {spec.job_id!r}")
    if spec.num_rows < 1 or spec.chunk_rows < 1:
        raise InvalidParameterError("num_rows", "a job needs at least one row")


def _digest(spec: JobSpec) -> str:
    """Tells jobs apart; two submits of the same job differ only in when they were made."""
    return hashlib.sha256(spec_encoder.encode(msgspec.structs.replace(spec, submitted_at=0.0))).hexdigest()


def _calls(payloads: Mapping[int, bytes]) -> list[list[int | bytes]]:
    """The arguments of calls of `append`, each of a moderate size."""
    calls: list[list[int | bytes]] = []
    num_bytes = 0
    for chunk, payload in payloads.items():
        if not calls or num_bytes + len(payload) > MAX_APPEND_BYTES or len(calls[-1]) >= 2 * MAX_APPEND_CHUNKS:
            calls.append([])
            num_bytes = 0
        calls[-1] += [chunk, payload]
        num_bytes += len(payload)
    return calls


def _ended(job_id: str) -> JobNotFoundError:
    return JobNotFoundError(f"job {job_id} has expired, or its submission took too long a break: submit it again")
