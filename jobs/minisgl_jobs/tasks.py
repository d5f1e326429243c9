"""The short Python jobs around the hot path, as RQ tasks that run nothing but what is listed here.

Arguments are JSON: nothing that comes from Redis is unpickled, and no function is looked up by a name from Redis unless
it is in ALLOWED. Called by worker groups, each of which supervises a process that runs `make_task_worker(...).work()`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, cast

import redis
import rq
from rq.exceptions import NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.registry import DeferredJobRegistry
from rq.serializers import JSONSerializer

from minisgl_batch.errors import TaskRefusedError
from minisgl_jobs.finalise import finalise
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.roots import AllowedRoots

logger = logging.getLogger(__name__)

FINALISE = "minisgl_jobs.tasks.run_finalise"
START = "minisgl_jobs.tasks.run_start"
ALLOWED = frozenset({FINALISE, START})

RETRY_S = 10.0  # a job that isn't finalised by then is fired again, unless its task shows signs of life
HEARTBEAT_S = 5  # between these; whole seconds
SILENT_S = 25.0  # a started task without one for so long is dead
TIMEOUT_S = 3600
RESULT_TTL_S = 3600
FAILURE_TTL_S = 86400
_LIMITS = {"timeout": TIMEOUT_S, "result_ttl": RESULT_TTL_S, "failure_ttl": FAILURE_TTL_S}


class AllowListJob(Job):  # type: ignore[misc]  # rq is untyped
    """An RQ job that reads JSON only and runs allowed functions only."""

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None) -> None:  # noqa: A002
        # Whatever a caller asks for: some of rq's own look-ups would take the pickling default.
        super().__init__(id, connection, serializer=JSONSerializer)

    @property
    def func(self) -> Any:
        """The function to run.

        Raises:
            TaskRefusedError: it isn't allowed, is a method, or brings callbacks or webhooks along.
        """
        name = self.func_name
        callbacks = (self._success_callback_name, self._failure_callback_name, self._stopped_callback_name)
        if name not in ALLOWED or self.instance is not None or any(callbacks) or getattr(self, "webhooks", None):
            logger.error("refused RQ task %s: %r is not allowed here, or comes with callbacks", self.id, name)
            raise TaskRefusedError(f"RQ task {self.id} names {name!r}, which is not allowed here")
        return super().func

    success_callback = failure_callback = stopped_callback = property(lambda _: None)

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Refused tasks end too, and must not call anybody."""


class TaskQueue(rq.Queue):  # type: ignore[misc]  # rq is untyped
    """RQ's queue with these jobs."""

    job_class = AllowListJob

    @classmethod
    def lmove(cls, connection: redis.Redis, queue_key: str, timeout: int | None) -> Any:
        """The next entry of RQ's list. Those that are no tasks are dropped: anybody may have put them there."""
        while (found := super().lmove(connection, queue_key, timeout)) is not None:
            entry: bytes = found[1]
            if _can_be_fetched(connection, entry):
                break
            logger.error("dropped an entry of %s that is no task: %r", queue_key, entry[:200])
            connection.lrem(IntermediateQueue(queue_key, connection).key, 1, entry)  # type: ignore[arg-type]
        return found

    def __init__(self, name: str, connection: redis.Redis, **options: Any) -> None:
        options.update(serializer=JSONSerializer, job_class=AllowListJob)
        super().__init__(name, connection, **options)


class TaskWorker(rq.Worker):  # type: ignore[misc]  # rq is untyped
    """RQ's worker with these queues and jobs."""

    job_class = AllowListJob
    queue_class = TaskQueue


def task_queue(client: redis.Redis, queue: str) -> TaskQueue:
    """The RQ queue of a model queue's tasks."""
    return TaskQueue(f"minisgl-{queue}", client)


def make_task_worker(client: redis.Redis, queues: Sequence[str], name: str) -> TaskWorker:
    """An RQ worker for the tasks of these model queues; give it a connection of its own, which RQ adjusts."""
    tasks = [task_queue(client, queue) for queue in queues]
    options = {"serializer": JSONSerializer, "job_monitoring_interval": HEARTBEAT_S}
    return TaskWorker(tasks, name=name, connection=client, **options)


def dispatch_finalise(outbox: Outbox, tasks: TaskQueue) -> int:
    """Enqueue a finalise task for each due job of the outbox; tells how many. Any worker group may, at any time."""
    num_enqueued = 0
    while (claim := outbox.claim(RETRY_S)) is not None:
        task_id = finalise_id(claim.job_id, claim.epoch)
        if not _is_under_way(tasks, task_id):
            args = (outbox.queue, claim.job_id, claim.epoch)
            tasks.enqueue_call(FINALISE, args, job_id=task_id, description=f"finalise {claim.job_id}", **_LIMITS)
            num_enqueued += 1
    return num_enqueued


def hold(tasks: TaskQueue, queue: str, job_id: str, *, after: str = "", start_at: float | None = None) -> None:
    """Make the task that will start a held job: a deferred one of RQ, or with a time alone a scheduled one."""
    if after:
        description = f"start {job_id} after {after}"
        options = {"status": JobStatus.DEFERRED, **_LIMITS}
        task = tasks.create_job(START, (queue, job_id), job_id=start_id(job_id), description=description, **options)
        task.save()
        tasks.connection.sadd(tasks.redis_queues_keys, tasks.key)  # what lists RQ's queues finds it
        DeferredJobRegistry(queue=tasks).add(task, ttl=-1)
    elif start_at is not None:
        at = datetime.fromtimestamp(start_at, timezone.utc)
        options = {"job_id": start_id(job_id), "description": f"start {job_id}", "job_timeout": TIMEOUT_S}
        tasks.enqueue_at(at, START, queue, job_id, result_ttl=RESULT_TTL_S, failure_ttl=FAILURE_TTL_S, **options)


def dispatch_starts(held: HeldJobs, tasks: TaskQueue) -> int:
    """Enqueue a start task for each held job for which the time has come; tells how many. As `dispatch_finalise`."""
    num_enqueued = 0
    while (job_id := held.claim()) is not None:
        num_enqueued += enqueue_start(held, tasks, job_id)
    return num_enqueued


def enqueue_start(held: HeldJobs, tasks: TaskQueue, job_id: str) -> bool:
    """Enqueue the task that starts a held job, in place of the one that waits, unless the job is to wait on."""
    task_id = start_id(job_id)
    if not held.is_ready(job_id) or _is_under_way(tasks, task_id):
        return False
    forget_start(tasks.connection, job_id)
    tasks.enqueue_call(START, (held.queue, job_id), job_id=task_id, description=f"start {job_id}", **_LIMITS)
    return True


def start_id(job_id: str) -> str:
    """The id of the RQ task that starts a held job."""
    return f"start-{job_id}"


def finalise_id(job_id: str, epoch: int) -> str:
    """The id of the RQ task that finalises an epoch of a job."""
    return f"finalise-{job_id}-{epoch}"


def forget_start(client: redis.Redis, job_id: str) -> None:
    """Delete the task that would start a held job, wherever it waits; there may be none."""
    _forget(client, start_id(job_id))


def forget_tasks(client: redis.Redis, job_id: str, epoch: int) -> None:
    """Delete all tasks of a job that has ended, with their results."""
    for task_id in (start_id(job_id), *(finalise_id(job_id, number) for number in range(epoch + 1))):
        _forget(client, task_id)


def _forget(client: redis.Redis, task_id: str) -> None:
    task = _fetch(client, task_id)
    if task is not None:
        task.delete()


def _fetch(client: redis.Redis, task_id: str) -> AllowListJob | None:
    """A task by its id; one that isn't RQ's record is deleted."""
    if not _can_be_fetched(client, task_id.encode()):
        logger.error("dropped %s, which is no task", task_id)
        client.delete(AllowListJob.key_for(task_id))
        return None
    with suppress(NoSuchJobError):
        return cast(AllowListJob, AllowListJob.fetch(task_id, connection=client))
    return None


def _can_be_fetched(client: redis.Redis, task_id: bytes) -> bool:
    """Whether RQ finds a task, or none, under a name; False when what is there makes it stumble."""
    try:
        AllowListJob.fetch(task_id.decode(), connection=client)
    except (redis.ConnectionError, redis.TimeoutError):
        raise
    except NoSuchJobError:
        return True  # RQ passes over it
    except Exception:  # noqa: BLE001  # whatever decoding it raises
        return False
    return True


def run_finalise(queue: str, job_id: str, epoch: int) -> str | None:
    """The RQ task: finalise a job on the connection of the task's worker; answers its last state."""
    client = rq.get_current_job().connection
    state = finalise(Outbox(client, queue), job_id, epoch, roots=AllowedRoots.of_environment())
    forget_start(client, job_id)  # of a job that was canceled while it was held
    for of_queue, follower in HeldJobs(client, queue).followers(job_id):
        enqueue_start(HeldJobs(client, of_queue), task_queue(client, of_queue), follower)
    return state.value if state else None


def run_start(queue: str, job_id: str) -> str:
    """The RQ task: start a held job if what it waits for has come; answers what became of it."""
    is_held = HeldJobs(rq.get_current_job().connection, queue).start(job_id)
    return "held" if is_held else "done"


def _is_under_way(tasks: TaskQueue, task_id: str) -> bool:
    """Whether an earlier task for the same waits in the queue, or runs and shows signs of life."""
    task = _fetch(tasks.connection, task_id)
    if task is None:
        return False
    status = task.get_status(refresh=False)
    if status == JobStatus.STARTED and task.last_heartbeat is not None:
        seen: datetime = task.last_heartbeat
        seen = seen if seen.tzinfo else seen.replace(tzinfo=timezone.utc)
        return datetime.now(timezone.utc) - seen < timedelta(seconds=SILENT_S)
    # A worker that died right after it had taken the task leaves it neither in the queue nor started.
    return bool(status == JobStatus.QUEUED) and tasks.get_job_position(task_id) is not None
