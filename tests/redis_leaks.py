"""Which keys in a Redis would stay there for ever though nothing needs them."""

from __future__ import annotations

import re
from typing import Any

import redis

from minisgl_jobs.keys import JOB_PARTS, QUEUE_PARTS, QUEUES, STREAM_PARTS

UNDER_WAY = (b"queued", b"running", b"canceling", b"finalising")
_NAME = re.compile(
    r"(?P<queue>mb:\{[A-Za-z0-9._-]+\}:)"
    rf"(?:(?P<part>{'|'.join(QUEUE_PARTS)})|(?:ring|turn):(?:high|normal|low)|(?:take|worker):\S+"
    rf"|job:(?P<job>[A-Za-z0-9_-]+)(?::(?:{'|'.join(JOB_PARTS + STREAM_PARTS)}|spool:\d+))?)"
)


def leaked_keys(client: redis.Redis) -> list[str]:
    """Keys of no known name, and keys without an end of which no job under way has need."""
    connection: Any = client
    leaked = []
    busy: set[str] = set()
    names = [key.decode() for key in connection.scan_iter(count=1000)]
    for name in names:
        match = _NAME.fullmatch(name)
        is_job = match is not None and name == f"{match['queue']}job:{match['job']}"
        if match is not None and is_job and connection.hget(name, "state") in UNDER_WAY:
            busy |= {match["queue"], name}
    for name in names:
        match = _NAME.fullmatch(name)
        if name == QUEUES or name.startswith("rq:"):
            continue
        if match is None:
            leaked.append(name)
            continue
        owner = f"{match['queue']}job:{match['job']}" if match["job"] else match["queue"]
        is_needed = owner in busy and not name.endswith(STREAM_PARTS)
        if not is_needed and match["part"] != "paused" and connection.ttl(name) == -1:
            leaked.append(name)
    return leaked
