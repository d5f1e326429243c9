"""Chunks as worker groups see them: take under a lease, keep it, spool finished rows, commit, or give back.

Knows the scripts and their answers, but nothing of engines, tokens or Parquet. Called by frontends; `queue.py` is the
clients' side of the same queue, `outbox.py` that of finalise.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import redis

from minisgl_batch.errors import DamagedJobError
from minisgl_batch.words import one_line
from minisgl_jobs.connection import SOCKET_TIMEOUT_S
from minisgl_jobs.keys import QUEUES, QueueKeys, queue_name
from minisgl_jobs.model import SCHEMA_VERSION, EngineInfo, JobSpec, JobState
from minisgl_jobs.outbox import RETENTION_S
from minisgl_jobs.scripts import Scripts, redis_errors
from minisgl_jobs.spool import decode_spool, encode_batch, sample_name
from minisgl_jobs.status import WorkerInfo, decode_engines

logger = logging.getLogger(__name__)

LEASE_S = 15.0
AUDIT_S = 30.0  # between looks for chunks that a torn append-only file has lost
SOLO_DEATHS = 2  # a chunk that saw so many runs alone in its worker
LOST_ROW_DEATHS = 2  # a row that died alone so often is given up
MAX_SPOOL_RESULTS = 1000  # in one call

_specs = msgspec.msgpack.Decoder(JobSpec)


class Renewal(str, Enum):
    """What became of a lease at its renewal."""

    OK = "ok"
    LOST = "lost"  # somebody else has the chunk: drop it
    CANCEL = "cancel"  # stop its rows, then complete it with those that are finished, or hand it back


class Commit(str, Enum):
    """What became of a chunk at its completion."""

    COMMITTED = "committed"
    AGAIN = "again"  # it was committed by this very lease before
    STALE = "stale"  # somebody else has it, or has committed it: drop the part


@dataclass(frozen=True)
class Lease:
    """A worker group's right to one chunk.

    Attributes:
        spec: the job.
        chunk: which of its chunks.
        token: the right itself; new and random for each lease.
        epoch: 0, and one more for each retry of the job: for the names of temporary parts.
        attempt: larger for each later lease of the chunk: for readers of its tokens.
        payload: the chunk's rows, as it was appended.
        spooled: (row, sample) -> encoded results that are finished already and not to be generated again.
        num_deaths: workers that died over it.
        suspect: rows that ran, alone in their worker, when it died last; run them first, in smaller parts.
        lost_rows: rows to give up as `worker_lost`.
        engines: what has generated rows of this job so far, `spooled` among them; this worker's own, too.
    """

    spec: JobSpec
    chunk: int
    token: str
    epoch: int
    attempt: int
    payload: bytes
    spooled: dict[tuple[int, int], bytes]
    num_deaths: int = 0
    suspect: range | None = None
    lost_rows: tuple[int, ...] = ()
    engines: tuple[EngineInfo, ...] = ()

    @property
    def rows(self) -> range:
        return self.spec.chunk_range(self.chunk)

    @property
    def is_solo(self) -> bool:
        """Whether the chunk must be alone in its worker, and each part of it announced by `ChunkQueue.probe`."""
        return self.num_deaths >= SOLO_DEATHS


class ChunkQueue:
    """One model's queue, for one worker group. Not for several threads at once.

    Methods raise RedisUnavailableError when Redis stays away; each may then be repeated without harm.
    """

    def __init__(
        self,
        client: redis.Redis,
        model: str,
        worker_id: str,
        *,
        lease_s: float = LEASE_S,
        audit_s: float = AUDIT_S,
        engine: EngineInfo | None = None,
    ) -> None:
        """
        Args:
            client: a connection to Redis.
            model: the served model's name.
            worker_id: unique among living groups, without blanks.
            lease_s: how long a chunk stays with a group that went silent. Renew three times as often.
            audit_s: how often `take` runs an audit.
            engine: what parts and manifests say about the engine.
        """
        self.keys = QueueKeys(queue_name(model))
        self.model = model
        self.worker_id = worker_id
        self.lease_s = lease_s
        self.engine: EngineInfo = engine or {}
        self._engine = json.dumps(self.engine)
        self._client = client
        self._scripts = Scripts(client)
        self._audit_s = audit_s
        self._next_audit = time.monotonic() + audit_s
        self._bell_id: bytes = b"0-0"
        self._next_expiry_s: float | None = None
        with redis_errors():
            if not client.hexists(QUEUES, self.keys.queue):  # a full Redis would refuse to write it again
                client.hset(QUEUES, self.keys.queue, model)

    def take(self, token: str | None = None, *, avoid: Sequence[str] = ()) -> Lease | None:
        """The chunk whose turn it is, or None: first one of a dead worker, then by priority and turn.

        Args:
            token: give the same again to repeat a call that failed half-way; by default a new one.
            avoid: jobs to leave to other workers.

        Jobs whose records are damaged are failed on the way.
        """
        if time.monotonic() >= self._next_audit:
            self.audit()
        token = token or secrets.token_hex(16)
        while True:
            reply = self._run("take", token, self.worker_id, self._lease_ms, SCHEMA_VERSION, self._engine, *avoid)
            if reply[0] == b"none":
                self._next_expiry_s = reply[1] / 1000 if reply[1] >= 0 else None
                return None
            job_id = _text(reply[1])
            if reply[0] == b"damaged":
                _log_damage(job_id, _text(reply[2]))
                continue
            try:
                return _parse_lease(token, reply)
            except DamagedJobError as error:
                self.fail(job_id, str(error))

    def fail(self, job_id: str, why: str) -> None:
        """Take a job out of the queue whose records are damaged; every lease of it is lost."""
        _log_damage(job_id, why)
        self._run("fail", job_id, one_line(why))

    def audit(self) -> int:
        """Find chunks and jobs again that a loss of data in Redis has torn out of the queue; tells how many."""
        self._next_audit = time.monotonic() + self._audit_s
        num_found, *damaged = self._run("audit", self._lease_ms, int(RETENTION_S * 1000))
        for job_id, why in zip(damaged[::2], damaged[1::2], strict=True):
            _log_damage(_text(job_id), _text(why))
        if num_found:
            logger.warning("Redis has lost data: found %d chunks and jobs again", num_found)
        return int(num_found)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend leases; tells for each what became of it. Call every third of `lease_s`, also without any."""
        args = [arg for lease in leases for arg in (lease.spec.job_id, lease.chunk, lease.token)]
        renewals = []
        for lease, answer in zip(leases, self._run("renew", self._lease_ms, *args), strict=True):
            word, _, why = _text(answer).partition(" ")
            if word == "damaged":
                _log_damage(lease.spec.job_id, why)
            renewals.append(Renewal.LOST if word == "damaged" else Renewal(word))
        return renewals

    def server_run_id(self) -> str:
        """Another one after each start of Redis, and on each server: what was written last may be lost then."""
        with redis_errors():
            info: Any = self._client.info("server")
        return str(info["run_id"])

    def canceled(self, job_ids: Iterable[str]) -> set[str]:
        """Those of these jobs that are being canceled: stop their rows, as after `Renewal.CANCEL`. Changes nothing."""
        asked = list(job_ids)
        with redis_errors():
            pipeline = self._client.pipeline(transaction=False)
            for job_id in asked:
                pipeline.hget(self.keys.job(job_id), "state")
            states = pipeline.execute(raise_on_error=False)
            for state in states:
                if isinstance(state, redis.RedisError) and not isinstance(state, redis.ResponseError):
                    raise state
        canceling = JobState.CANCELING.value.encode()
        return {job_id for job_id, state in zip(asked, states, strict=True) if state == canceling}

    def spool(self, lease: Lease, results: Mapping[tuple[int, int], bytes], *, num_rows: int) -> bool:
        """Keep finished results, (row, sample) -> encoded; those that are there already stay as they are.

        Args:
            num_rows: rows of the chunk that are finished with all of their samples once these are there; those that
                are in its part already are counted, too.

        Returns:
            False when the lease is lost.

        Raises:
            RedisFullError: keep them in memory; the chunk can be completed all the same.
        """
        items = list(results.items())
        for start in range(0, max(1, len(items)), MAX_SPOOL_RESULTS):
            batch = dict(items[start : start + MAX_SPOOL_RESULTS])
            names = [sample_name(*sample) for sample in batch]
            if self._run_lease("spool", lease, encode_batch(batch), num_rows, *names) == b"stale":
                return False
        return True

    def probe(self, lease: Lease, rows: range) -> bool:
        """Note that exactly these rows of a solo chunk run from now on; False when the lease is lost."""
        return bool(self._run_lease("probe", lease, rows.start, rows.stop) == b"ok")

    def complete(self, lease: Lease, *, rows_ok: int, rows_error: int) -> Commit:
        """Commit a chunk whose part is on disk under its temporary name; rename the part next, then `renamed`.

        Raises:
            ValueError: the rows are not those of the chunk.
        """
        answer = self._run_lease("complete", lease, rows_ok, rows_error)
        if answer == b"miscounted":
            raise ValueError(f"{rows_ok} + {rows_error} rows for a chunk of {len(lease.rows)}")
        return Commit(answer.decode())

    def renamed(self, leases: Iterable[Lease]) -> None:
        """Confirm that the parts of committed chunks have their final names."""
        for lease in leases:
            self._run_lease("renamed", lease)

    def handback(self, leases: Iterable[Lease], *, reason: str = "") -> None:
        """Give chunks back, such as at a drain; spooled results stay with them. Lost ones are passed over.

        Args:
            reason: why this worker can't do them, for the job's status; it lasts until somebody takes a chunk.
        """
        for lease in leases:
            self._run_lease("handback", lease, f"{self.worker_id} can't take it: {reason}" if reason else "")

    def give_up(self, lease: Lease, reason: str) -> None:
        """Give a chunk back and end its job, which can't go on anywhere."""
        self._run("cancel", lease.spec.job_id, reason)
        self._run_lease("handback", lease, "")

    def heartbeat(self, info: WorkerInfo, ttl_s: float = LEASE_S) -> None:
        """Register this group, or go on being registered."""
        self._run("heartbeat", info.worker_id, int(ttl_s * 1000), msgspec.msgpack.encode(info))

    def leave(self) -> None:
        """End the registration."""
        self._run("heartbeat", self.worker_id, 0, b"")

    def wait_for_work(self, timeout_s: float) -> None:
        """Block until there may be work: the bell, or a lease that may have expired; at most for the time given."""
        # A third of a lease at most, so that this group is seen alive: see note_activity in prelude.lua.
        limits = [timeout_s, self.lease_s / 3, SOCKET_TIMEOUT_S / 2]
        if self._next_expiry_s is not None:
            limits.append(self._next_expiry_s)
        block_ms = max(1, int(min(limits) * 1000))
        with redis_errors():
            reply: Any = self._client.xread({self.keys.part("bell"): self._bell_id}, count=100, block=block_ms)
        if reply:
            self._bell_id = reply[0][1][-1][0]

    @property
    def _lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    def _run(self, script: str, *args: str | bytes | int) -> Any:
        return self._scripts.run(script, self.keys.prefix, *args)

    def _run_lease(self, script: str, lease: Lease, *args: str | bytes | int) -> Any:
        try:
            return self._run(script, lease.spec.job_id, lease.chunk, lease.token, *args)
        except DamagedJobError as error:
            self.fail(lease.spec.job_id, str(error))
            return b"stale"


def _parse_lease(token: str, reply: list[Any]) -> Lease:
    """The answer of the `take` script; DamagedJobError when it isn't what this package writes."""
    try:
        lease = _lease(token, reply)
    except Exception as error:  # whatever decoding raises: anybody may have put it there
        raise DamagedJobError(f"chunk {_text(reply[2])}: {type(error).__name__}: {error}") from error
    if not 0 <= lease.chunk < lease.spec.num_chunks or lease.spec.job_id != _text(reply[1]) or lease.epoch < 0:
        raise DamagedJobError(f"chunk {lease.chunk} of epoch {lease.epoch} is none of job {lease.spec.job_id}")
    return lease


def _text(reply: bytes) -> str:
    return reply.decode(errors="backslashreplace")


def _log_damage(job_id: str, why: str) -> None:
    logger.error("job %s is failed for what Redis holds of it: %s", one_line(job_id), one_line(why))


def _lease(token: str, reply: list[Any]) -> Lease:
    _, _, chunk, attempt, epoch, spec, payload, poison, spool, engines = reply
    deaths: dict[str, Any] = json.loads(poison) if poison else {"deaths": 0, "rows": {}}
    lost = tuple(sorted(int(row) for row, num in deaths["rows"].items() if num >= LOST_ROW_DEATHS))
    suspect = range(*map(int, deaths["suspect"])) if deaths.get("suspect") else None
    if suspect is not None and len(suspect) == 1 and suspect.start in lost:
        suspect = None
    return Lease(
        spec=_specs.decode(spec),
        chunk=int(chunk),
        token=token,
        epoch=int(epoch),
        attempt=int(attempt),
        payload=payload,
        spooled=decode_spool(zip(spool[::2], spool[1::2], strict=True)),
        num_deaths=int(deaths["deaths"]),
        suspect=suspect,
        lost_rows=lost,
        engines=tuple(decode_engines(engines)),
    )
