"""Looks at a job again and again: puts up with an outage of Redis, and helps jobs that no worker looks after."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from minisgl_batch.client.progress import Progress
from minisgl_batch.errors import JobTimeoutError, RedisUnavailableError
from minisgl_jobs.reader import OUTAGE_S
from minisgl_jobs.unserved import end_unserved

HELP_S = 1.0  # between looks whether a job that only has to be ended is left alone


class Watcher:
    """One watch of one job; `look` as often as you like, until the state is a final one."""

    def __init__(self, client: redis.Redis, job_id: str, progress: Callable[[], Progress]) -> None:
        self._client = client
        self._job_id = job_id
        self._progress = progress
        self._started = time.monotonic()
        self._away_since: float | None = None
        self._help_at = 0.0
        self._last: Progress | None = None

    def look(self) -> Progress | None:
        """The job's progress, or None while Redis is away.

        Raises:
            RedisUnavailableError: it has stayed away for OUTAGE_S.
        """
        try:
            progress = self._progress()
            if time.monotonic() >= self._help_at:
                end_unserved(self._client, progress.status)
                self._help_at = time.monotonic() + HELP_S
        except RedisUnavailableError:
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - self._away_since > OUTAGE_S:
                raise
            return None
        self._away_since = None
        self._last = progress
        return progress

    def check_time(self, timeout_s: float | None) -> None:
        """Raise JobTimeoutError when the watch has taken longer than `timeout_s`."""
        if timeout_s is not None and time.monotonic() - self._started >= timeout_s:
            raise JobTimeoutError(self._job_id, self._last.state.value if self._last else "not known", timeout_s)
