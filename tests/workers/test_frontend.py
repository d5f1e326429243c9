"""The frontend's loop, with stubs around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from minisgl_jobs.status import WorkerInfo
from minisgl_workers.frontend import Frontend


def test_a_bell_is_followed_by_a_look_at_redis_however_soon_it_rings() -> None:
    """It rings once: a wait that it ended, and that no look follows, would be followed by half a second of sleep."""
    calls: list[str] = []

    def wait_for_work() -> None:
        calls.append("wait")
        if len(calls) > 10:
            frontend.drain(0)

    delivery = SimpleNamespace(
        works=[],
        stopped=[],
        spooled=[],
        tick=lambda *_, **__: calls.append("look"),
        wait_for_work=wait_for_work,
        hand_back=lambda: None,
    )
    publishing = SimpleNamespace(ends=lambda _: None, tick=lambda *_: None)
    link = SimpleNamespace(send=lambda _: None)
    tokenizer = SimpleNamespace(detokenizer=None)
    stubs = cast(Any, (delivery, publishing, link, tokenizer))
    frontend = Frontend(*stubs, WorkerInfo("w", "m"), cast(Any, None))
    frontend.run(10)
    assert calls == ["look", "wait"] * (len(calls) // 2)
    assert len(calls) > 10
