"""Child processes: how they are started, how they say that they are ready or failed, how they end.

A child gets its configuration as the first line of its standard input, which then stays open as a lifeline: when the
parent is gone, however it went, the child sees the end of file and leaves at once. It answers on a status pipe. Knows
nothing of what the children do. Used by the supervisor of a worker group and by `LLM` (parent side), and by each
child's `main`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, TypeAlias, TypeVar

import msgspec

from minisgl_batch.errors import MiniSGLError

logger = logging.getLogger(__name__)

_STATUS_FD_ENV = "MINISGL_STATUS_FD"
Config = TypeVar("Config", bound=msgspec.Struct)


class ChildReady(msgspec.Struct, frozen=True, tag="ready"):
    """The child does its work from now on."""

    info: dict[str, Any] = {}


class ChildFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The child ends because of an error; `expected` ones are the user's to solve and need no traceback."""

    message: str
    expected: bool
    exit_code: int


ChildStatus: TypeAlias = ChildReady | ChildFailed
_status_decoder: msgspec.json.Decoder[ChildStatus] = msgspec.json.Decoder(ChildStatus)


class ChildProcess:
    """The parent's side of one child.

    Attributes:
        name: for logs.
        status_fd: readable when the child said something or is gone.
    """

    def __init__(
        self,
        name: str,
        module: str,
        config: msgspec.Struct,
        env: dict[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> None:
        """Start `python -m module`, in a session of its own so that a terminal's Ctrl-C reaches the parent alone.

        Its output goes to `log`, by default to where the parent's goes.
        """
        self.name = name
        self.status_fd, child_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(child_fd,),
                env=os.environ | (env or {}) | {_STATUS_FD_ENV: str(child_fd)},
                start_new_session=True,
            )
        finally:
            os.close(child_fd)
        self._buffer = b""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.debug("%s ended before it read its configuration", name)  # its exit code is reported by poll

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_status(self) -> ChildStatus | None:
        """What the child said, once `status_fd` is readable; None when it is gone."""
        while b"\n" not in self._buffer:
            data = os.read(self.status_fd, 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return _status_decoder.decode(line)

    def describe_end(self) -> str:
        """How it ended, in words, once it is gone."""
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self, timeout_s: float) -> None:
        """End it: SIGTERM, and SIGKILL after `timeout_s`."""
        self.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self.status_fd)


class StatusPipe:
    """The child's side: says once that it is ready."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def ready(self, **info: Any) -> None:
        self._write(ChildReady(info))

    def failed(self, failure: ChildFailed) -> None:
        self._write(failure)

    def _write(self, status: ChildStatus) -> None:
        os.write(self._fd, msgspec.json.encode(status) + b"\n")


def run_child(
    name: str,
    config_type: type[Config],
    main: Callable[[Config, StatusPipe], None],
    on_orphaned: Callable[[], None] = lambda: None,
) -> None:
    """The whole life of a child process: read the configuration, run `main`, report an error, exit.

    Args:
        on_orphaned: called, in a thread of its own, before the process leaves because its parent is gone.
    """
    status = StatusPipe(int(os.environ[_STATUS_FD_ENV]))
    setup_logging(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(_read_line(sys.stdin.fileno()), type=config_type)
    threading.Thread(target=_end_with_parent, args=(on_orphaned,), name="lifeline", daemon=True).start()
    try:
        main(config, status)
    except MiniSGLError as error:
        status.failed(ChildFailed(str(error), expected=True, exit_code=error.exit_code))
        sys.exit(error.exit_code)
    except Exception as error:
        logger.exception("%s failed", name)
        status.failed(ChildFailed(f"{type(error).__name__}: {error}", expected=False, exit_code=1))
        sys.exit(1)


def setup_logging(name: str) -> None:
    """Log lines of this process to standard error, with its name."""
    logging.basicConfig(
        level=os.environ.get("MINISGL_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s %(levelname).1s {name}: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def _end_with_parent(on_orphaned: Callable[[], None]) -> None:
    # Nothing but the end of file comes: the parent is gone, and with it whoever would restart this group in order.
    # What is lost is what any crash loses; a tidy end could hang, for example in a collective without its peers.
    while os.read(sys.stdin.fileno(), 1):
        pass
    on_orphaned()
    os._exit(1)


def _read_line(fd: int) -> bytes:
    """One line and nothing beyond it, past Python's buffers, which the lifeline's thread would hold at exit."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            sys.exit(1)  # the parent is gone already
        line += byte
    return bytes(line)
