"""Keeps Ctrl-C out of work that can't be left halfway. Called by the in-process `LLM`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """KeyboardInterrupt is raised at the end of what runs within; a second Ctrl-C raises it at once.

    Only in the main thread, where Python raises it, and where the program has no handler of its own. An error from
    within comes in place of the interrupt.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal is_held
        if is_held:  # what runs may hang
            signal.default_int_handler(number, frame)
        is_held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_held:
        raise KeyboardInterrupt
