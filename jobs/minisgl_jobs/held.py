"""Jobs that wait for a time or for another job's end: noted at submit, started when both have come.

A job whose predecessor ends finished or partial is started; when that fails, is canceled or is purged, it is canceled
too, and its status says why. Nothing here depends on being told: held jobs are looked at now and then. Knows nothing of
RQ; `tasks.py` makes tasks of these steps.
"""

from __future__ import annotations

from typing import Any

import redis

from minisgl_batch.errors import JobNotFoundError, JobStateError
from minisgl_jobs.keys import QueueKeys
from minisgl_jobs.model import JobState
from minisgl_jobs.queue import LOOK_S, JobQueue
from minisgl_jobs.scripts import Scripts, redis_errors


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

    def start(self, job_id: str) -> bool:
        """Start a held job if nothing that it waits for is left, or cancel it if that can't come any more.

        Returns:
            Whether it is still held.
        """
        with redis_errors():
            reply: Any = self._client.hmget(self._keys.job(job_id), "held", "after")
        is_held, after = reply
        if not is_held:
            return False
        if after:
            state = follow(self._client, after.decode(), self.queue, job_id)
            if state is not None and not state.is_final:
                return True
            if state is None or not state.is_complete:
                self._cancel(job_id, after.decode(), state)
                return False
        return bool(self._scripts.run("release", self._keys.prefix, job_id) == b"early")

    def followers(self, job_id: str) -> list[tuple[str, str]]:
        """(queue, job) of all that wait for a job's end."""
        with redis_errors():
            members: Any = self._client.smembers(self._keys.job(job_id, "followers"))
        return [(queue, follower) for queue, follower in (member.decode().split() for member in sorted(members))]

    def _cancel(self, job_id: str, after: str, state: JobState | None) -> None:
        became = {None: "is gone", JobState.FAILED: "has failed"}.get(state, "was canceled")
        try:
            JobQueue(self._client).cancel(job_id, f"job {after}, which it was to follow, {became}")
        except (JobNotFoundError, JobStateError):
            return  # a user was faster


def follow(client: redis.Redis, after: str, queue: str, job_id: str) -> JobState | None:
    """Let a job's end tell a held one; answers the state that it is in by now, None when there is no such job."""
    try:
        prefix = JobQueue(client).find(after).prefix
    except JobNotFoundError:
        return None
    state = Scripts(client).run("follow", prefix, after, f"{queue} {job_id}")
    return JobState(state.decode()) if state else None
