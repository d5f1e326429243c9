"""The frontend's loop, with stubs around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from minisgl_batch.hub import model_path
from minisgl_batch.messages import AddRequests, EngineStats, FromEngine, StepOutput
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.tokenizer import ModelTokenizer
from minisgl_jobs.leases import Lease
from minisgl_jobs.model import JobSpec, Row
from minisgl_jobs.references import ChunkRows
from minisgl_jobs.status import WorkerInfo
from minisgl_workers import frontend
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

    stats = EngineStats(num_running=3, num_waiting=2, prompt_tokens=7)
    stubs.frontend._rate.since, stubs.frontend._rate.per_s = time.monotonic(), 514.0

    def last_step() -> list[FromEngine]:
        stubs.works.clear()
        empty: Any = b""
        return [StepOutput(empty, empty, empty, empty, empty, stats)]

    stubs.receive = last_step
    stubs.frontend.run(10)
    assert stubs.infos[-1].prompt_tokens == 7
    assert {(info.num_running, info.num_waiting, info.tokens_per_s) for info in stubs.infos} == {(0, 0, 0.0)}


def run_chunk(
    spec: JobSpec, rows: list[Row], *holds: bool, stop_after: int = 99
) -> tuple[ChunkWork, list[AddRequests]]:
    """A chunk, and what the engine was asked for it.

    Args:
        holds: whether the chunk's lease is the worker's, each time that it looks.
        stop_after: messages to the engine, after which the chunk is another worker's.
    """
    work = ChunkWork(Lease(spec, 0, "token", 0, 1, b"", {}), ChunkRows(rows, "hash"))
    answers = iter(holds)
    sent: list[Any] = []

    def tick(*_: Any, **__: Any) -> None:
        is_stopped = len(sent) >= stop_after
        if is_stopped or sum(len(message.prompts) for message in sent) + len(work.results) == len(rows):
            delivery.stopped += [work] * is_stopped
            delivery.works.clear()
            made.drain(0)

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
    made = Frontend(*stubs, WorkerInfo("w", "m"), cast(Any, None))
    made.run(100)
    return work, [message for message in sent if isinstance(message, AddRequests)]


def test_redis_is_looked_at_between_rows_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those with GBNF. Each comes once, also when the lease is away; of a stopped chunk no more come."""
    monkeypatch.setattr(frontend, "PREPARE_S", 1e-9)
    monkeypatch.setattr(frontend, "TICK_S", 0.0)
    spec = JobSpec("j", "m", num_rows=4, chunk_rows=4, output="/nowhere", params=SamplingParams(max_tokens=4))
    rows = [Row(0, prompt="1 ="), Row(1, prompt=""), Row(2, prompt="2 ="), Row(3, prompt="3 =")]
    work, added = run_chunk(spec, rows, True, True, False, True, True)
    assert [len(message.prompts) for message in added] == [1, 1, 1]
    assert len({message.prompts[0].prompt_ids for message in added}) == 3
    assert list(work.results) == [(1, 0)]
    _, added = run_chunk(spec, rows, *[True] * 9, stop_after=1)
    assert [len(message.prompts) for message in added] == [1]


def test_rows_are_not_sent_to_the_engine_when_their_lease_ran_out_while_they_were_tokenized() -> None:
    """They are sent once it is ours again, all of them and once."""
    spec = JobSpec("j", "m", num_rows=3, chunk_rows=3, output="/nowhere", params=SamplingParams(max_tokens=4))
    rows = [Row(0, prompt="1 + 1 ="), Row(1, prompt=""), Row(2, prompt="2 + 2 =")]
    work, added = run_chunk(spec, rows, True, False, False, True, True)
    assert [len(message.prompts) for message in added] == [2]
    assert [(key, result.error is not None) for key, result in work.results.items()] == [((1, 0), True)]


def test_what_a_job_says_of_chats_reaches_the_engine() -> None:
    """Its system message and how it continues; a row may say otherwise."""
    chat = [{"role": "user", "content": "17 + 25 ="}, {"role": "assistant", "content": "4"}]
    params = SamplingParams(max_tokens=4, continue_final_message=True)
    spec = JobSpec("j", "m", num_rows=2, chunk_rows=2, output="/nowhere", params=params, system="Be kind.")
    rows = [Row(0, messages=chat), Row(1, messages=chat, params=SamplingParams(continue_final_message=False, n=2))]
    _, (added,) = run_chunk(spec, rows, True, True)
    tokenizer = ModelTokenizer.load(model_path("demo"))
    texts = [tokenizer.hf_tokenizer.decode(np.frombuffer(prompt.prompt_ids, "<i4")) for prompt in added.prompts]
    begun = "<|system|>Be kind.<|end|><|user|>17 + 25 =<|end|><|assistant|>4"
    assert texts == [begun, f"{begun}<|end|><|assistant|>"]
    assert [[new.sample_index for new in prompt.requests] for prompt in added.prompts] == [[0], [0, 1]]
