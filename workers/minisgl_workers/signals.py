"""SIGTERM and SIGINT as something that a loop can wait for. Used by the supervisors, in their main threads."""

from __future__ import annotations

import os
import selectors
import signal
from types import FrameType


class StopSignals:
    """Counts SIGTERM and SIGINT while it is entered.

    Attributes:
        count: how many have come.
        fd: readable when one has come since the last `clear`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fd = -1

    def clear(self) -> None:
        """Take note of what has come."""
        os.read(self.fd, 64)

    def sleep(self, timeout_s: float) -> bool:
        """Wait; true when a signal came meanwhile."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.fd, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def __enter__(self) -> StopSignals:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)

        def count(_number: int, _frame: FrameType | None) -> None:
            self.count += 1

        self._previous = {number: signal.signal(number, count) for number in (signal.SIGTERM, signal.SIGINT)}
        self._previous_fd = signal.set_wakeup_fd(self._write_fd)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)
