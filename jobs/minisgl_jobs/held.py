"""Jobs that wait for a time or for another job's end: noted at submit, started when both have come.

A job whose predecessor ends finished or partial is started; when that fails, is canceled or is purged, it is canceled
too, and its status says why. Nothing here depends on being told: held jobs are looked at now and then. Knows nothing of
RQ; `tasks.py` makes tasks of these steps.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import redis

from minisgl_batch.errors import DamagedJobError, JobNotFoundError, JobStateError
from minisgl_jobs.keys import QueueKeys
from minisgl_jobs.model import JobState
from minisgl_jobs.queue import LOOK_S, JobQueue
from minisgl_jobs.scripts import Scripts, redis_errors
from minisgl_jobs.status import reading_record

logger = logging.getLogger(__name__)


class _Verdict(Enum):
    FREE = auto()  # it isn't held (any more)
    WAIT = auto()
    START = auto()
    CANCEL = auto()


class HeldJobs:
    """The held jobs of one queue. Methods raise RedisUnavailableError when Redis stays away; each may be repeated."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self.queue = queue
        self._client = client
        self._keys = QueueKeys(queue)
        self._scripts = Scripts(client)

    def claim(self) -> str | None:
        """The next job that is due for a look; it is due again after LOOK_S."""
        job_id = self._scripts.run("heldclaim", self._keys.prefix, int(LOOK_S * 1000))
        return job_id.decode() if job_id else None

    def is_ready(self, job_id: str) -> bool:
        """Whether `start` would start or cancel the job now. When only its time is to come, it is due again then."""
        return self._judge(job_id)[0] in (_Verdict.START, _Verdict.CANCEL)

    def start(self, job_id: str) -> bool:
        """Start a held job if nothing that it waits for is left, or cancel it if that can't come any more.

        Returns:
            Whether it is still held.
        """
        verdict, why = self._judge(job_id)
        if verdict is _Verdict.START:
            return bool(self._scripts.run("release", self._keys.prefix, job_id) == b"early")
        if verdict is _Verdict.CANCEL:
            with suppress(JobNotFoundError, JobStateError):  # a user was faster
                JobQueue(self._client).cancel(job_id, why)
        return verdict is _Verdict.WAIT

    def followers(self, job_id: str) -> list[tuple[str, str]]:
        """(queue, job) of all that wait for a job's end."""
        with redis_errors():
            members: Any = self._client.smembers(self._keys.job(job_id, "followers"))
        return [(queue, follower) for queue, follower in (member.decode().split() for member in sorted(members))]

    def _judge(self, job_id: str) -> tuple[_Verdict, str]:
        """What is to become of a job, and why when it is to be canceled. One whose records are damaged is failed."""
        try:
            with reading_record(self._keys.job(job_id)):
                return self._look(job_id)
        except DamagedJobError as error:
            logger.error("job %s can't be started and is failed: %s", job_id, error)
            self._scripts.run("fail", self._keys.prefix, job_id, str(error))
            return _Verdict.FREE, ""

    def _look(self, job_id: str) -> tuple[_Verdict, str]:
        with redis_errors():
            reply: Any = self._client.hmget(self._keys.job(job_id), "held", "after", "start_ms")
            now_s, now_us = self._client.time()
        is_held, after, start_ms = reply
        if not is_held:
            return _Verdict.FREE, ""
        if after:
            first = after.decode()
            state = follow(self._client, first, self.queue, job_id)
            if state is not None and not state.is_final:
                return _Verdict.WAIT, ""
            if state is None or not state.is_complete:
                became = {None: "is gone", JobState.FAILED: "has failed"}.get(state, "was canceled")
                return _Verdict.CANCEL, f"job {first}, which it was to follow, {became}"
        if int(start_ms) > now_s * 1000 + now_us / 1000:
            with redis_errors():
                self._client.zadd(self._keys.part("held"), {job_id: int(start_ms)}, xx=True)
            return _Verdict.WAIT, ""
        return _Verdict.START, ""


def follow(client: redis.Redis, after: str, queue: str, job_id: str) -> JobState | None:
    """Let a job's end tell a held one; answers the state that it is in by now, None when there is no such job."""
    try:
        keys = JobQueue(client).find(after)
        with reading_record(keys.job(after)):
            state = Scripts(client).run("follow", keys.prefix, after, f"{queue} {job_id}")
            return JobState(state.decode()) if state else None
    except (JobNotFoundError, DamagedJobError):
        return None
