"""What can be read about jobs and workers: typed answers to `JobQueue.status`, `.jobs` and `.workers`.

Knows the replies of the scripts, but makes no calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl_batch.errors import DamagedJobError
from minisgl_batch.words import count, one_line
from minisgl_jobs.model import EngineInfo, JobSpec, JobState, check_schema_version

spec_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.json.Decoder(EngineInfo)
_spec_decoder = msgspec.msgpack.Decoder(JobSpec)


class WorkerInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker group tells about itself.

    Attributes:
        worker_id: unique among living groups.
        model: the served model's name.
        host, pid: where it runs.
        since: Unix seconds of its start.
        tokens_per_s: generated lately.
        num_running, num_waiting: requests in its engine.
        prompt_tokens, cached_tokens: of all prompts since its start, and how many of them the prefix cache had.
        trouble: why it takes no chunks and its finished ones wait, such as a full disk; "" for none.
        description: what its engine is.
        drops_tools: whether the model's chat template takes no notice of tools.
    """

    worker_id: str
    model: str
    host: str = ""
    pid: int = 0
    since: float = 0.0
    tokens_per_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    trouble: str = ""
    description: EngineInfo = {}
    drops_tools: bool = False


_worker_decoder = msgspec.msgpack.Decoder(WorkerInfo)


@dataclass(frozen=True)
class LeaseInfo:
    """Who works on a chunk.

    Attributes:
        expires_in_s: by the server's clock; negative when the worker has gone silent.
        num_spooled: results (rows times samples) that are finished already.
        rows_spooled: rows of which all samples are; those that an earlier job or worker left on disk are among them.
    """

    chunk: int
    worker_id: str
    expires_in_s: float
    num_spooled: int
    rows_spooled: int


@dataclass(frozen=True, repr=False)
class JobStatus:
    """A job at one moment.

    Attributes:
        spec: what it is.
        state: where it is in its life.
        epoch: 0, and one more for each retry.
        rows_ok, rows_error: rows of committed chunks.
        chunks_done: committed chunks of this epoch.
        leases: chunks that are being worked on.
        created_at, queued_at, started_at, finished_at: Unix seconds of the server's clock; None when not yet.
        now: when this was read, by the same clock.
        num_deaths: how often a chunk of this job was given out again since its worker had died or gone silent; a worker
            that held several counts for each.
        num_workers: living worker groups that serve its queue.
        paused: whether its queue is paused.
        error: why it failed or was canceled.
        blocked: why the last worker that took a chunk gave it back, until somebody takes one again.
        trouble: why no worker of its queue takes a chunk, such as the full disk of another job; "" when one does.
        num_waiting, rows_waiting: finished results, and rows, of chunks that were handed back and wait for another
            worker.
        after: the job whose end this one waits for, "" for none (any more).
        start_at: when this job may start, Unix seconds of the server's clock; None when it may.
    """

    spec: JobSpec
    state: JobState
    epoch: int
    rows_ok: int
    rows_error: int
    chunks_done: int
    leases: tuple[LeaseInfo, ...]
    created_at: float
    queued_at: float | None
    started_at: float | None
    finished_at: float | None
    now: float
    num_deaths: int
    num_workers: int
    paused: bool
    error: str
    blocked: str = ""
    trouble: str = ""
    num_waiting: int = 0
    rows_waiting: int = 0
    after: str = ""
    start_at: float | None = None

    def __repr__(self) -> str:
        parts = [f"{self.state.value}, {self.rows_done:,} of {count(self.spec.num_rows, 'row')} done"]
        parts += [f"{self.rows_error:,} failed"] if self.rows_error else []
        parts += [f"waiting: {self.waiting}"] if self.waiting else []
        parts += [one_line(self.error)] if self.error else []
        return f"<JobStatus of {self.job_id}: {', '.join(parts)}>"

    @property
    def is_held(self) -> bool:
        """Whether it waits for a time or for another job."""
        return bool(self.after) or self.start_at is not None

    @property
    def job_id(self) -> str:
        return self.spec.job_id

    @property
    def rows_done(self) -> int:
        """Rows of committed chunks."""
        return self.rows_ok + self.rows_error

    @property
    def num_spooled(self) -> int:
        """Results that are finished, but whose chunk isn't."""
        return sum(lease.num_spooled for lease in self.leases) + self.num_waiting

    @property
    def rows_spooled(self) -> int:
        """Rows that are finished with all of their samples, but whose chunk isn't."""
        return sum(lease.rows_spooled for lease in self.leases) + self.rows_waiting

    @property
    def waiting(self) -> str:
        """What the job waits for, such as "no worker for MODEL"; "" when it gets on."""
        if self.state is JobState.SUBMITTING or self.state.is_final:
            return ""
        if self.after:
            return f"the end of job {self.after}"
        if self.start_at is not None:
            return f"its time, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.start_at))}"
        if self.paused and self.state in (JobState.QUEUED, JobState.RUNNING):
            return "the queue is paused"
        if not self.num_workers:
            return f"no worker for {one_line(self.spec.model)}"
        if self.leases:
            return ""
        return self.blocked or (self.trouble if self.state in (JobState.QUEUED, JobState.RUNNING) else "")


@contextmanager
def reading_record(key: str) -> Iterator[None]:
    """Name the key of a record that can't be read: others may write to the same Redis.

    Raises:
        DamagedJobError: it is none of ours.
    """
    try:
        yield
    except (DamagedJobError, KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise DamagedJobError(f"{one_line(key)} in Redis is no record of minisgl-batch: remove it") from error


def decode_worker(data: bytes) -> WorkerInfo:
    """A worker's registration."""
    return _worker_decoder.decode(data)


def decode_engines(lines: bytes) -> list[EngineInfo]:
    """The engines that have had chunks of a job, as its hash has them."""
    return [_engine_decoder.decode(line) for line in lines.splitlines()]


def decode_spec(fields: dict[bytes, bytes], job_id: str) -> JobSpec:
    """The spec in a job's hash.

    Raises:
        SchemaVersionError: another release wrote it.
    """
    check_schema_version(int(fields[b"schema"]), f"job {job_id}")
    return _spec_decoder.decode(fields[b"spec"])


def parse_status(job_id: str, reply: list[Any]) -> JobStatus:
    """The reply of the `status` script.

    Raises:
        SchemaVersionError: another release wrote the job.
    """
    flat, leases, workers, paused, now_ms, num_waiting, rows_waiting = reply
    fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    is_held = b"held" in fields and fields[b"state"] == JobState.QUEUED.value.encode()
    return JobStatus(
        spec=decode_spec(fields, job_id),
        state=JobState(fields[b"state"].decode()),
        epoch=int(fields[b"epoch"]),
        rows_ok=int(fields[b"ok"]),
        rows_error=int(fields[b"errors"]),
        chunks_done=int(fields[b"done"]),
        leases=tuple(
            LeaseInfo(int(chunk), worker.decode(), (float(deadline) - now_ms) / 1000, num_results, num_rows)
            for chunk, worker, deadline, num_results, num_rows in zip(*(leases[i::5] for i in range(5)), strict=True)
        ),
        created_at=int(fields[b"created_at"]) / 1000,
        queued_at=_seconds(fields, b"queued_at"),
        started_at=_seconds(fields, b"started_at"),
        finished_at=_seconds(fields, b"finished_at"),
        now=now_ms / 1000,
        num_deaths=int(fields.get(b"deaths", 0)),
        num_workers=len(workers),
        trouble=_common_trouble(workers),
        paused=bool(paused),
        blocked=fields.get(b"blocked", b"").decode(),
        error=(fields.get(b"error") or fields.get(b"canceled", b"")).decode(),
        num_waiting=num_waiting,
        rows_waiting=rows_waiting,
        after=fields[b"after"].decode() if is_held else "",
        start_at=int(fields[b"start_ms"]) / 1000 if is_held and int(fields[b"start_ms"]) else None,
    )


def _common_trouble(workers: list[bytes]) -> str:
    """What the first worker says when none of them takes chunks."""
    first = ""
    for data in workers:
        try:
            info = decode_worker(data)
        except msgspec.MsgspecError:  # `JobQueue.workers` tells of it
            continue
        if not info.trouble:
            return ""
        first = first or f"{one_line(info.worker_id)} takes no chunks: {one_line(info.trouble)}"
    return first


def _seconds(fields: dict[bytes, bytes], name: bytes) -> float | None:
    return int(fields[name]) / 1000 if name in fields else None
