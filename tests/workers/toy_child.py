"""A child of a supervisor that does what a test tells it: python -m tests.workers.toy_child.

It notes its process id in `<folder>/<name>.pid`, and carries out the word that it finds in `<folder>/<name>.do`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from minisgl_batch.child_process import StatusPipe, run_child
from minisgl_batch.errors import UsageError

POLL_S = 0.01


class ToyConfig(msgspec.Struct, frozen=True):
    """Who it is, where its orders are, and the directory for sockets that the supervisor gave."""

    name: str
    folder: str
    sockets: str


def main(config: ToyConfig, status: StatusPipe) -> None:
    orders, progress = Path(config.folder) / f"{config.name}.do", itertools.count()
    signal.signal(signal.SIGTERM, lambda *_: drain(config))
    if config.name == "frontend":
        (Path(config.sockets) / "socket").touch()
    note = Path(config.folder) / f".{config.name}"
    note.write_text(str(os.getpid()))
    note.rename(Path(config.folder) / f"{config.name}.pid")
    order = take(orders)
    if order == "never ready":
        raise UsageError("there is no such thing")
    done: int | None = 0

    def beat() -> int | None:
        return done

    status.ready(beat, pid=os.getpid())
    while True:
        match order:
            case "raise":
                raise ValueError("broken")
            case "exit":
                sys.exit(3)
            case "leave":
                sys.exit(0)
            case "deliver":
                status.delivered()
            case "suspect":
                status.suspects(True)
            case "hang":
                while True:
                    time.sleep(60)
            case "idle":
                done = None
            case _ if done is not None:
                done = next(progress)
        time.sleep(POLL_S)
        order = take(orders)


def take(orders: Path) -> str:
    """The order, once."""
    try:
        order = orders.read_text()
    except FileNotFoundError:
        return ""
    if not order.endswith("\n"):
        return ""
    orders.unlink()
    return order.strip()


def drain(config: ToyConfig) -> None:
    is_frontend = config.name == "frontend"
    (Path(config.folder) / ("drained" if is_frontend else "ended")).touch()
    if not (is_frontend and (Path(config.folder) / "stubborn").exists()):
        sys.exit(0)


if __name__ == "__main__":
    run_child(sys.argv[0], ToyConfig, main)
