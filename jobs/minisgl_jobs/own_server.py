"""Where the Redis server is that one user's processes share when no URL is given. Starts none.

Knows nothing of jobs. Called by the client, which looks for it, and by `embedded_redis`, which starts it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from urllib.parse import quote

import redis

from minisgl_batch.errors import RedisUnavailableError
from minisgl_jobs.connection import connect

MAX_SOCKET_PATH_BYTES = 100  # 104 on macOS, 108 on Linux, both with the closing NUL


def default_data_dir() -> Path:
    """The folder of this user's shared server."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "minisgl-batch" / "redis"


def socket_path(data_dir: Path) -> Path:
    """Where a server with its data in this folder listens.

    Raises:
        RedisUnavailableError: the folder's path is too long for a socket, and the place in its stead isn't ours.
    """
    path = data_dir / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"minisgl-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RedisUnavailableError(f"{folder} belongs to somebody else: remove it, or give --redis URL")
    return folder / "redis.sock"


def socket_url(path: Path) -> str:
    """A socket's URL for `connect`."""
    return f"unix://{quote(str(path))}"


def connect_own() -> redis.Redis:
    """A connection to the server that this user shares, which runs while somebody uses it.

    Raises:
        RedisUnavailableError: it doesn't run.
    """
    try:
        return connect(socket_url(socket_path(default_data_dir())))
    except RedisUnavailableError as error:
        raise RedisUnavailableError(
            "no Redis URL is given, and no server of yours runs: start a worker (minisgl-batch worker --model ...), "
            f"give a URL such as redis://localhost:6379, or set MINISGL_REDIS ({error})"
        ) from None
