"""The command line as a process of its own, for tests of what threads can't show: signals, exits, terminals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
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
    """A running `minisgl-batch`, or another module of ours. Use as a context manager; leaving kills it.

    Attributes:
        stdout, stderr: what it has said so far; on a terminal, both in `stdout`.
    """

    def __init__(
        self,
        *args: object,
        module: str = "minisgl_batch.cli.main",
        cwd: Path | None = None,
        terminal: bool = False,
        prefix: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Start it, in a session of its own as in a terminal of its own.

        Args:
            prefix: a command that it is the arguments of.
            variables: go to its environment.
        """
        command = [*prefix, sys.executable, "-m", module, *map(str, args)]
        out, out_writer = pty.openpty() if terminal else os.pipe()
        err, err_writer = (None, out_writer) if terminal else os.pipe()
        env = environment(**variables)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out_writer,
            stderr=err_writer,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        for writer in {out_writer, err_writer}:
            os.close(writer)
        self._out, self._err = bytearray(), bytearray()
        self._readers = [threading.Thread(target=_read, args=(out, self._out), daemon=True)]
        if err is not None:
            self._readers.append(threading.Thread(target=_read, args=(err, self._err), daemon=True))
        for reader in self._readers:
            reader.start()

    @property
    def stdout(self) -> str:
        return self._out.decode()

    @property
    def stderr(self) -> str:
        return self._err.decode()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until it has said something."""

        def has_said() -> bool:
            is_over = self._process.poll() is not None and not any(reader.is_alive() for reader in self._readers)
            said = self.stdout + self.stderr
            assert text in said or not is_over, f"it ended without saying {text!r}: {said}"
            return text in said

        wait_for(f"{text!r} of a command", has_said, timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def finish(self, code: int = 0, timeout_s: float = 60.0) -> Command:
        """Wait for its end and check its exit code."""
        found = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        assert found == code, f"exit code {found}: {self.stdout}{self.stderr}"
        return self

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


def _read(fd: int, said: bytearray) -> None:
    """Collect what comes until the other end is closed."""
    with open(fd, "rb", buffering=0) as pipe:
        while True:
            try:
                data = pipe.read(1 << 16)
            except OSError:  # how a terminal says that it is closed
                return
            if not data:
                return
            said += data
