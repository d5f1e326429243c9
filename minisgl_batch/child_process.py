"""Child processes: how they are started, how they say that they are ready or failed, how they end.

A child gets its configuration as the first line of its standard input, which then stays open as a lifeline: when the
parent is gone, however it went, the child sees the end of file and leaves at once. It answers on a status pipe: ready,
failed, and in between a beat each second that shows whether it gets on. Knows nothing of what the children do. Used by
the supervisor of a worker group and by `LLM` (parent side), and by each child's `main`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias, TypeVar

import msgspec

from minisgl_batch.errors import InvalidParameterError, MiniSGLError, RankLostError, WorkerError

logger = logging.getLogger(__name__)

BEAT_S = 1.0
LOG_PREFIX_ENV = "MINISGL_LOG_PREFIX"
"""What log lines of a process and its children begin with, such as its group."""
DUMP_STACKS_ENV = "MINISGL_DUMP_STACKS"
"""Set, a child whose parent is gone says where it was."""
_STATUS_FD_ENV = "MINISGL_STATUS_FD"
_PR_SET_PDEATHSIG = 1
Config = TypeVar("Config", bound=msgspec.Struct)


class ChildReady(msgspec.Struct, frozen=True, tag="ready"):
    """The child does its work from now on."""

    info: dict[str, Any] = {}


class ChildFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The child ends because of an error.

    Attributes:
        message: what happened.
        expected: the user can solve it, and needs no traceback.
        exit_code: for the command that started it all.
        at_s: when, on the monotonic clock, which the processes of a machine share.
        field: the option at fault, if it is one's.
    """

    message: str
    expected: bool
    exit_code: int
    at_s: float = 0.0
    field: str = ""

    def error(self) -> InvalidParameterError | WorkerError:
        """The error for whoever started the child."""
        if self.field:
            return InvalidParameterError(self.field, self.message.removeprefix(f"{self.field}: "))
        return WorkerError(self.message, exit_code=self.exit_code)

    @property
    def is_echo(self) -> bool:
        """Whether another child's death brought this about."""
        return self.exit_code == RankLostError.EXIT_CODE


class ChildBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life. `progress` is another number when the child got on since; None when it has nothing to do."""

    progress: int | None


class ChildSuspects(msgspec.Struct, frozen=True, tag="suspects"):
    """From now on the child works on what has killed its like before, or no more: its death tells nothing of itself."""

    suspects: bool


class ChildDelivered(msgspec.Struct, frozen=True, tag="delivered"):
    """Something came of the work since the child was ready: what kills it later doesn't always kill it at once."""


ChildStatus: TypeAlias = ChildReady | ChildFailed | ChildBeat | ChildSuspects | ChildDelivered
_status_decoder: msgspec.json.Decoder[ChildStatus] = msgspec.json.Decoder(ChildStatus)


@dataclass(frozen=True)
class ChildPlan:
    """How to start a child.

    Attributes:
        name: for logs.
        module: what `python -m` runs; its main calls `run_child`.
        config: what it is told.
        env: additions to its environment.
        is_spare: the others do without it for a while: when it dies it alone is started again.
    """

    name: str
    module: str
    config: msgspec.Struct
    env: dict[str, str] = field(default_factory=dict)
    is_spare: bool = False

    def start(self) -> ChildProcess:
        """Start it."""
        return ChildProcess(self.name, self.module, self.config, self.env)


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

    @property
    def has_more(self) -> bool:
        """Whether it has said more already; `status_fd` need not be readable for it."""
        return b"\n" in self._buffer

    @property
    def ended_in_order(self) -> bool:
        """Whether its exit code is 0, once it is gone."""
        return self._process.wait() == 0

    def describe_end(self) -> str:
        """How it ended, in words, once it is gone."""
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self, timeout_s: float) -> None:
        """End it: SIGTERM, and SIGKILL after `timeout_s`; without one, SIGKILL alone."""
        try:
            if timeout_s > 0:
                self.send_signal(signal.SIGTERM)
                self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end within %.0f s", self.name, timeout_s)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it may have ended before it read its configuration
            self._process.stdin.close()
        os.close(self.status_fd)


class StatusPipe:
    """The child's side. May be used from several threads: a status is one write that the pipe takes as a whole."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def ready(self, progress: Callable[[], int | None] | None = None, /, **info: Any) -> None:
        """The work begins.

        Args:
            progress: from now on said each second, from a thread: how far the main thread has come; see ChildBeat. The
                parent may take a child that beats and then makes no progress, or beats no more, for one that hangs.
        """
        if progress is not None:
            self._start_beats(progress)
        self._write(ChildReady(info))

    def failed(self, failure: ChildFailed) -> None:
        """The end of it."""
        self._write(failure)

    def suspects(self, suspects: bool) -> None:
        """See ChildSuspects."""
        self._write(ChildSuspects(suspects))

    def delivered(self) -> None:
        """See ChildDelivered."""
        self._write(ChildDelivered())

    def _start_beats(self, progress: Callable[[], int | None]) -> None:
        self._write(ChildBeat(progress()))  # before it is ready: one that is stopped right then is missed, too

        def beat() -> None:
            while True:
                time.sleep(BEAT_S)
                self._write(ChildBeat(progress()))

        threading.Thread(target=beat, name="beats", daemon=True).start()

    def _write(self, status: ChildStatus) -> None:
        os.write(self._fd, msgspec.json.encode(status) + b"\n")


def run_child(
    name: str,
    config_type: type[Config],
    main: Callable[[Config, StatusPipe], None],
    on_orphaned: Callable[[Config], None] | None = None,
) -> None:
    """The whole life of a child process: read the configuration, run `main`, report an error, exit.

    Args:
        on_orphaned: called, in a thread of its own, before the process leaves because its parent is gone. Without it
            the process is killed by Linux, also when it hangs or is stopped, as soon as the thread that started it is
            gone: a parent should start such children in its main thread.
    """
    if on_orphaned is None:
        die_with_parent()
    status = StatusPipe(int(os.environ[_STATUS_FD_ENV]))
    setup_logging(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(_read_line(sys.stdin.fileno()), type=config_type)
    threading.Thread(target=_end_with_parent, args=(on_orphaned, config), name="lifeline", daemon=True).start()
    try:
        main(config, status)
    except RankLostError as error:
        status.failed(ChildFailed(str(error), True, error.exit_code, time.monotonic()))
        os._exit(error.exit_code)  # collectives that were left by an error have threads, which a tidy end may abort on
    except MiniSGLError as error:
        field = error.field if isinstance(error, InvalidParameterError) else ""
        status.failed(ChildFailed(str(error), True, error.exit_code, time.monotonic(), field))
        sys.exit(error.exit_code)
    except Exception as error:
        logger.exception("%s failed", name)
        status.failed(ChildFailed(f"{type(error).__name__}: {error}", False, 1, time.monotonic()))
        sys.exit(1)


def setup_logging(name: str) -> None:
    """Log lines of this process to standard error, with its name."""
    name = os.environ.get(LOG_PREFIX_ENV, "") + name
    logging.basicConfig(
        level=os.environ.get("MINISGL_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s %(levelname).1s {name}: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def die_with_parent() -> None:
    """On Linux: have this process killed when the thread that started it ends, also when it hangs or is stopped.

    A parent that is gone by now left its mark on the lifeline.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent(on_orphaned: Callable[[Config], None] | None, config: Config) -> None:
    # Nothing but the end of file comes: the parent is gone, and with it whoever would restart this group in order.
    # What is lost is what any crash loses; a tidy end could hang, for example in a collective without its peers.
    while os.read(sys.stdin.fileno(), 1):
        pass
    if DUMP_STACKS_ENV in os.environ:
        faulthandler.dump_traceback()
    try:
        if on_orphaned is not None:
            on_orphaned(config)
    finally:
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
