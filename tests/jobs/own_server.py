"""A Redis server that a test may kill, cut short and start again."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType

from minisgl_workers.embedded_redis import find_server
from minisgl_workers.redis_watchdog import answers, command
from tests.jobs.helpers import wait_for


class OwnServer:
    """Like the embedded server, but nobody looks after it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """With a `port` it has replicas, too."""
        self._folder = folder
        self._port = port
        self._socket = folder / "s"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"]
        self._process = subprocess.Popen([*command(str(find_server()), str(self._folder), str(self._socket)), *options])
        wait_for("Redis", lambda: answers(str(self._socket)))

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def lose_power(self, num_bytes: int) -> None:
        """Kill the server and cut the end off its append-only file."""
        self.kill()
        log = max(self._folder.rglob("appendonly*.aof"), key=lambda path: path.stat().st_mtime)
        with log.open("r+b") as file:
            file.truncate(max(0, log.stat().st_size - num_bytes))

    def take_place_of(self, other: OwnServer) -> None:
        """Serve under the other server's URL; that one has ended."""
        self._socket.rename(other._socket)

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
