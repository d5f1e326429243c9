"""Jobs whose chunks are all committed, on their way to a last state: claimed, finalised, ended.

Knows the scripts and their answers, but nothing of Parquet or RQ. Called by the finalise task and by whoever fires it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import redis

from minisgl_batch.errors import DamagedJobError, JobNotFoundError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.keys import QueueKeys
from minisgl_jobs.model import JobSpec, JobState
from minisgl_jobs.scripts import Scripts, redis_errors
from minisgl_jobs.spool import decode_spool
from minisgl_jobs.status import decode_spec, reading_record

RETENTION_S = 7 * 86400.0
DEFAULT_SAMPLING = "default_sampling"  # beside what a worker says about its engine


@dataclass(frozen=True)
class Claim:
    """An entry of the outbox that the caller has for a while."""

    job_id: str
    epoch: int


@dataclass(frozen=True)
class FinalisingJob:
    """What finalise needs to know of a job.

    Attributes:
        epoch: which is being finalised.
        is_canceled: whether the job was canceled.
        cancel_reason: why, "" when a user wished it.
        num_done: committed chunks of this epoch.
        rows_ok, rows_error: rows of committed chunks.
        renames: committed chunk -> (token, epoch) of parts whose rename was not confirmed; -1 for a number that is
            none. `parts.pending_name` refuses what is damaged.
        left_over: chunks that were given back and not committed, such as those of a canceled job.
        engine: what the worker that started the job said about its engine.
        default_sampling: and about what holds where neither rows nor jobs say anything; None for nothing.
        queued_at, started_at: Unix seconds, server clock.
    """

    spec: JobSpec
    epoch: int
    is_canceled: bool
    cancel_reason: str
    num_done: int
    rows_ok: int
    rows_error: int
    renames: dict[int, tuple[str, int]]
    left_over: tuple[int, ...]
    engine: dict[str, str | int | float | bool | None]
    default_sampling: SamplingParams | None
    queued_at: float | None
    started_at: float | None


class Outbox:
    """The outbox of one queue. Methods raise RedisUnavailableError when Redis stays away; each may be repeated."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self.queue = queue
        self._keys = QueueKeys(queue)
        self._client = client
        self._scripts = Scripts(client)

    def claim(self, ttl_s: float) -> Claim | None:
        """The next job that is due; it is due again after `ttl_s` unless it is finished by then."""
        reply = self._scripts.run("finclaim", self._keys.prefix, int(ttl_s * 1000))
        return Claim(reply[0].decode(), int(reply[1])) if reply else None

    def load(self, job_id: str, epoch: int) -> FinalisingJob | None:
        """The job, or None when this epoch of it isn't finalising (any more).

        Raises:
            JobNotFoundError: there is no such job (any more).
            SchemaVersionError: another release wrote it.
            DamagedJobError: its records are not ours; it is failed now.
        """
        try:
            with reading_record(self._keys.job(job_id)):
                return self._load(job_id, epoch)
        except DamagedJobError as error:
            self._scripts.run("fail", self._keys.prefix, job_id, str(error))
            raise

    def _load(self, job_id: str, epoch: int) -> FinalisingJob | None:
        hash_, records, todo = self._scripts.run("finload", self._keys.prefix, job_id)
        fields: dict[bytes, bytes] = dict(zip(hash_[::2], hash_[1::2], strict=True))
        if not fields:
            raise JobNotFoundError(f"no job {job_id} in queue {self.queue}: finished jobs expire")
        spec = decode_spec(fields, job_id)
        if fields[b"state"] != JobState.FINALISING.value.encode() or int(fields[b"epoch"]) != epoch:
            return None
        renames: dict[int, tuple[str, int]] = {}
        for chunk, record in zip(records[::2], records[1::2], strict=True):
            token, _, of_epoch = record.partition(b" ")
            renames[_number(chunk)] = (token.decode(errors="backslashreplace"), _number(of_epoch))
        engine = dict(json.loads(fields.get(b"engine", b"{}")))
        defaults = engine.pop(DEFAULT_SAMPLING, None)
        return FinalisingJob(
            spec=spec,
            epoch=epoch,
            is_canceled=b"canceled" in fields,
            cancel_reason=fields.get(b"canceled", b"").decode(),
            num_done=int(fields[b"done"]),
            rows_ok=int(fields[b"ok"]),
            rows_error=int(fields[b"errors"]),
            renames=renames,
            left_over=tuple(sorted(map(int, todo))),
            engine=engine,
            default_sampling=None if defaults is None else msgspec.convert(defaults, SamplingParams),
            queued_at=_seconds(fields.get(b"queued_at")),
            started_at=_seconds(fields.get(b"started_at")),
        )

    def spooled(self, job_id: str, chunk: int) -> dict[tuple[int, int], bytes]:
        """(row, sample) -> encoded result in a left-over chunk's spool."""
        with redis_errors():
            fields: dict[Any, Any] = self._client.hgetall(self._keys.spool(job_id, chunk))
        return decode_spool(fields.items())

    def payload(self, job_id: str, chunk: int) -> bytes:
        """A chunk's payload, b"" when it is gone."""
        with redis_errors():
            payload: Any = self._client.hget(self._keys.job(job_id, "in"), str(chunk))
        return bytes(payload or b"")

    def note_error(self, job_id: str, epoch: int, error: str) -> None:
        """Say in the job's status why it can't be finalised at the moment."""
        self._scripts.run("finerror", self._keys.prefix, job_id, epoch, error)

    def finish(
        self,
        job_id: str,
        epoch: int,
        state: JobState,
        *,
        error: str = "",
        rows: tuple[int, int] | None = None,
        retention_s: float = RETENTION_S,
    ) -> bool:
        """Give the job its last state; its keys expire after `retention_s`.

        Args:
            error: why it failed or was canceled.
            rows: how many are ok and not, when there are others than those of committed chunks.

        Returns:
            False when this epoch had been finished before, or another one is under way.
        """
        args = (job_id, epoch, state.value, int(retention_s * 1000), error, *(rows or ()))
        return bool(self._scripts.run("findone", self._keys.prefix, *args) == b"done")


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < 19 else -1


def _seconds(milliseconds: bytes | None) -> float | None:
    return int(milliseconds) / 1000 if milliseconds is not None else None
