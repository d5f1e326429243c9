"""A service as users run it: processes, an embedded Redis, and the demo model."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minisgl_batch.client import Client
from tests.jobs.helpers import wait_for
from tests.processes import Command

Start = Callable[..., Command]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Where the commands of a module keep their Redis and temporary files; short, for the sake of socket paths."""
    with tempfile.TemporaryDirectory(prefix="mb-") as folder:
        (Path(folder) / "tmp").mkdir()
        yield Path(folder)
        wait_for("the end of Redis", lambda: not any(Path(folder).rglob("redis.sock")))


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Start:
    """Starts a command in the test's folder, as in a terminal of its own."""

    def start_command(*args: object, **options: object) -> Command:
        return make_command(home, *args, **{"cwd": tmp_path, **options})

    return start_command


@pytest.fixture(scope="module")
def worker(home: Path) -> Iterator[Command]:
    """A worker group that serves the demo model, on the Redis that the user's commands share; it must stop in order."""
    with make_command(home, "worker", "--model", "demo", "--num-pages", 4096, "--json") as command:
        command.wait_for("serving jobs for demo")
        yield command
        command.signal(signal.SIGINT)
        command.finish()


def make_client(home: Path) -> Client:
    """A client of the Redis that the commands in `home` share."""
    (socket,) = home.rglob("redis.sock")
    return Client(f"unix://{socket}")


def make_command(home: Path, *args: object, **options: object) -> Command:
    variables = {"XDG_STATE_HOME": str(home / "state"), "TMPDIR": str(home / "tmp")}
    return Command(*args, **{**variables, **options})  # type: ignore[arg-type]
