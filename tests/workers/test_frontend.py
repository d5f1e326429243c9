"""The frontend's loop, with stubs around it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from minisgl_batch.hub import model_path
from minisgl_batch.messages import AddRequests, EngineStats, FromEngine, StepOutput
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.tokenizer import ModelTokenizer
from minisgl_jobs.leases import Lease
from minisgl_jobs.model import JobSpec, Row
from minisgl_jobs.references import ChunkRows
from minisgl_jobs.status import WorkerInfo
from minisgl_workers.frontend import Frontend
from minisgl_workers.work import ChunkWork


class Stubs:
    """What stands around a frontend.

    Attributes:
        frontend: the frontend.
        works: chunks that it has.
        calls: "look" at Redis and "wait" for work, in order.
        infos: what it said about itself with each look.
        receive: what the engine answers.
    """

    def __init__(self) -> None:
        self.works: list[object] = []
        self.calls: list[str] = []
        self.infos: list[WorkerInfo] = []
        self.receive: Callable[[], list[FromEngine]] = list
        delivery = SimpleNamespace(
            works=self.works,
            stopped=[],
            spooled=[],
            trouble="",
            tick=self._tick,
            wait_for_work=self._wait_for_work,
            hand_back=lambda: None,
        )
        publishing = SimpleNamespace(ends=lambda _: None, tick=lambda *_: None)
        link = SimpleNamespace(send=lambda _: None, receive=lambda _: self.receive())
        tokenizer = SimpleNamespace(detokenizer=None)
        stubs = cast(Any, (delivery, publishing, link, tokenizer))
        self.frontend = Frontend(*stubs, WorkerInfo("w", "m"), cast(Any, None))

    def _tick(self, info: WorkerInfo, *, take: bool) -> None:
        self.calls.append("look")
        self.infos.append(info)

    def _wait_for_work(self) -> None:
        self.calls.append("wait")
        if len(self.calls) > 10:
            self.frontend.drain(0)


def test_a_bell_is_followed_by_a_look_at_redis_however_soon_it_rings() -> None:
    """It rings once: a wait that it ended, and that no look follows, would be followed by half a second of sleep."""
    stubs = Stubs()
    stubs.frontend.run(10)
    assert stubs.calls == ["look", "wait"] * (len(stubs.calls) // 2)
    assert len(stubs.calls) > 10


def test_an_idle_group_says_that_nothing_runs() -> None:
    """The engine's last numbers are those of its last step, whose rows have finished."""
    stubs = Stubs()
    row_work = SimpleNamespace(lease=SimpleNamespace(is_solo=False), next_part=lambda: None)
    stubs.works.append(row_work)

    def last_step() -> list[FromEngine]:
        stubs.works.clear()
        empty: Any = b""
        return [
            StepOutput(empty, empty, empty, empty, empty, EngineStats(num_running=3, num_waiting=2, prompt_tokens=7))
        ]

    stubs.receive = last_step
    stubs.frontend.run(10)
    assert stubs.infos[-1].prompt_tokens == 7
    assert {(info.num_running, info.num_waiting) for info in stubs.infos} == {(0, 0)}


def test_rows_are_not_sent_to_the_engine_when_their_lease_ran_out_while_they_were_tokenized() -> None:
    """They are sent once it is ours again, all of them and once."""
    spec = JobSpec("j", "m", num_rows=3, chunk_rows=3, output="/nowhere", params=SamplingParams(max_tokens=4))
    rows = [Row(0, prompt="1 + 1 ="), Row(1, prompt=""), Row(2, prompt="2 + 2 =")]
    work = ChunkWork(Lease(spec, 0, "token", 0, 1, b"", {}), ChunkRows(rows, "hash"))
    answers = iter([True, False, False, True, True])
    sent: list[Any] = []

    def tick(*_: Any, **__: Any) -> None:
        if sent:
            delivery.works.clear()
            frontend.drain(0)

    delivery = SimpleNamespace(
        works=[work],
        stopped=[],
        spooled=[],
        trouble="",
        tick=tick,
        holds=lambda _: next(answers),
        hand_back=lambda: None,
    )
    publishing = SimpleNamespace(ends=lambda _: None, tick=lambda *_: None, started=lambda *_: None)
    link = SimpleNamespace(send=sent.append, receive=lambda _: [])
    stubs = cast(Any, (delivery, publishing, link, ModelTokenizer.load(model_path("demo"))))
    frontend = Frontend(*stubs, WorkerInfo("w", "m"), cast(Any, None))
    frontend.run(100)
    added = [message for message in sent if isinstance(message, AddRequests)]
    assert [len(message.prompts) for message in added] == [2]
    assert [(key, result.error is not None) for key, result in work.results.items()] == [((1, 0), True)]
