"""The command line as a process of its own, for tests of what threads can't show: signals, exits, terminals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from tests.jobs.helpers import wait_for


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process of ours, with this process's import paths."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}


def run_python(program: str) -> str:
    """What a program prints in an interpreter of its own."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment()).stdout


class Command:
    """A running `minisgl-batch`. Use as a context manager; leaving kills it if it still runs.

    Attributes:
        stdout, stderr: what it has said so far.
    """

    def __init__(self, *args: object, cwd: Path | None = None, **variables: str) -> None:
        command = [sys.executable, "-m", "minisgl_batch.cli.main", *map(str, args)]
        pipe = subprocess.PIPE
        # In a session of its own, as in a terminal of its own.
        self._process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, cwd=cwd, env=environment(**variables), start_new_session=True
        )
        self._readers = []
        self._said: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        for name, said in self._said.items():
            reader = threading.Thread(target=self._read, args=(getattr(self._process, name), said), daemon=True)
            reader.start()
            self._readers.append(reader)

    @property
    def stdout(self) -> str:
        return self._said["stdout"].decode()

    @property
    def stderr(self) -> str:
        return self._said["stderr"].decode()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until it has said something."""

        def has_said() -> bool:
            said = self.stdout + self.stderr
            assert text in said or self._process.poll() is None, f"it ended without saying {text!r}: {said}"
            return text in said

        wait_for(f"{text!r} of a command", has_said, timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def finish(self, code: int = 0, timeout_s: float = 60.0) -> Command:
        """Wait for its end and check its exit code."""
        found = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        assert found == code, f"exit code {found}: {self.stdout}{self.stderr}"
        return self

    def _read(self, pipe: int, said: bytearray) -> None:
        while data := pipe.read1():  # type: ignore[attr-defined]
            said += data

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(10)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
