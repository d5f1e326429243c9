"""Every key name in Redis, for Python and for the Lua scripts.

All keys of a model's queue begin with `mb:{queue}:`; the braces make it one hash slot. `{queue}` is derived from the
model's name. Knows only names. Called by every module that touches Redis.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from minisgl_batch.errors import InvalidParameterError

QUEUES = "mb:queues"
"""Hash: queue -> model, every queue that ever had a job or a worker."""

QUEUE_PARTS = (
    "lease",  # zset: "job|chunk" -> deadline, server ms
    "held",  # zset: job that waits for a time or another job -> when to look at it, server ms
    "fin",  # zset, the outbox of finalise: job -> next try, server ms
    "tick",  # string: when a worker was last seen taking or renewing, server ms
    "grace",  # string: until when nobody takes over, server ms
    "paused",  # string, present while the queue is paused
    "bell",  # stream that wakes idle workers
    "jobs",  # zset: job -> when it was created, server ms
    "workers",  # zset: worker -> when its registration ends, server ms
    "noop",  # never exists
)
JOB_PARTS = (
    "in",  # hash: chunk -> payload
    "todo",  # list: chunks to hand out again
    "live",  # hash: chunk -> "token attempt worker"
    "done",  # bitmap: committed chunks
    "renames",  # hash: committed chunk -> "token epoch" until the rename of its part is confirmed
    "bad",  # hash: chunk -> number of error rows
    "poison",  # hash: chunk -> JSON of its deaths
    "followers",  # set: "queue job" of jobs that wait for this one's end
)
STREAM_PARTS = (  # of a job too, but always with a short life of their own
    "tokens",  # stream: the last token messages
    "watch",  # string: present while somebody reads the tokens; changes when one needs snapshots
)
EVENTS = "events"
"""The part of a job's pub/sub channel: token messages and changes of state."""

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def queue_name(model: str) -> str:
    """The queue of a served model: its name where that is safe in a key, else a readable form with a hash.

    Raises:
        InvalidParameterError: the name can't be written as UTF-8.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")[:64]
    if safe and safe == model:
        return safe
    try:
        return f"{safe}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
    except UnicodeEncodeError:
        raise InvalidParameterError("model", f"isn't valid Unicode: {model!r}") from None


def is_job_id(job_id: str) -> bool:
    """Whether the id can stand in key names, folder names, RQ's job ids and command lines."""
    return _JOB_ID.fullmatch(job_id) is not None


@dataclass(frozen=True)
class QueueKeys:
    """The names of one queue."""

    queue: str

    @property
    def prefix(self) -> str:
        return f"mb:{{{self.queue}}}:"

    def part(self, name: str) -> str:
        """One of QUEUE_PARTS."""
        return self.prefix + name

    def ring(self, priority: str) -> str:
        """zset: job -> its last turn in server us; jobs that had none yet are negative and in order of arrival."""
        return f"{self.prefix}ring:{priority}"

    def turn(self, priority: str) -> str:
        """String, present when the ring's last turn went to a new job: the next one goes to an old one."""
        return f"{self.prefix}turn:{priority}"

    def last_take(self, worker: str) -> str:
        """String: "token job chunk" of the worker's last take, for a call that is repeated."""
        return f"{self.prefix}take:{worker}"

    def worker(self, worker: str) -> str:
        """String: the worker's registration, as MessagePack."""
        return f"{self.prefix}worker:{worker}"

    def job(self, job_id: str, part: str = "") -> str:
        """The job's own hash, or one of JOB_PARTS or STREAM_PARTS, or EVENTS."""
        return f"{self.prefix}job:{job_id}:{part}" if part else f"{self.prefix}job:{job_id}"

    def spool(self, job_id: str, chunk: int) -> str:
        """Hash: "row.sample" -> number of the batch that holds its result; "b<number>" -> batch; "n" -> batches;
        "rows" -> rows all of whose samples are there, or in the chunk's part."""
        return f"{self.prefix}job:{job_id}:spool:{chunk}"


def lua_names() -> str:
    """Lua source that gives the scripts these names; there KEYS[1] is the queue's prefix."""
    parts = ", ".join(f"{name} = KEYS[1] .. '{name}'" for name in QUEUE_PARTS)
    job_parts = ", ".join(f"'{part}'" for part in JOB_PARTS)
    return f"""\
local key = {{{parts}}}
local job_parts = {{{job_parts}}}
local function ring_key(priority) return KEYS[1] .. 'ring:' .. priority end
local function turn_key(priority) return KEYS[1] .. 'turn:' .. priority end
local function take_key(worker) return KEYS[1] .. 'take:' .. worker end
local function worker_key(worker) return KEYS[1] .. 'worker:' .. worker end
local function job_key(job, part) return KEYS[1] .. 'job:' .. job .. (part and ':' .. part or '') end
local function spool_key(job, chunk) return KEYS[1] .. 'job:' .. job .. ':spool:' .. chunk end
"""
