"""Connects the processes of a group, which may be started again at any time, to a Redis that may be away just then."""

from __future__ import annotations

import logging
import time

import redis

from minisgl_batch.errors import RedisUnavailableError
from minisgl_jobs.connection import connect

logger = logging.getLogger(__name__)

RETRY_S = 0.5


def connect_patiently(url: str) -> redis.Redis:
    """Connect, however long it takes: whoever started the group has found this Redis to be there and usable."""
    is_away = False
    while True:
        try:
            return connect(url)
        except RedisUnavailableError as error:  # noqa: PERF203 - it is what the loop is for
            if not is_away:
                logger.warning("%s; trying again until it can be", error)
            is_away = True
            time.sleep(RETRY_S)
