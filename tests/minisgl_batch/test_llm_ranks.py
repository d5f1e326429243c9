"""The in-process LLM with several ranks: the same answers as with one, and no end that leaves anything hanging."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.distributed import place
from minisgl_batch.distributed.place import RankPlace, places_on_this_host
from minisgl_batch.distributed.rendezvous import open_store
from minisgl_batch.distributed.ticks import TickReceiver, TickSender
from minisgl_batch.errors import InvalidParameterError, ModelError, RankLostError, WorkerError
from minisgl_batch.scheduler import followers
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.schemas import fits, random_schema
from tests.minisgl_batch.test_llm import MESSAGES, example_messages
from tests.processes import environment

ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)
DEATH_S = 20.0  # "within seconds", on a machine that does much else
SHORT_S, IDLE_S = 2.0, 10.0


@pytest.fixture(scope="module", autouse=True)
def idle() -> Iterator[tuple[LLM, float]]:
    """Ranks that wait `SHORT_S` for each other at most, and when they ran out of work: it is while other tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "COLLECTIVE_TIMEOUT_S", SHORT_S)
        llm = _warmed_up()
    with llm:
        yield llm, time.monotonic()


def _warmed_up(num_tries: int = 5) -> LLM:
    """On a busy machine the limit may be too short for a rank's first steps, which load what they need."""
    try:
        with ExitStack() as failing:
            llm = failing.enter_context(LLM("demo", dtype="float32", tp=2))
            assert llm.chat(MESSAGES, progress=False)[0].outputs[0].text == "42"
            failing.pop_all()
            return llm
    except WorkerError:
        if num_tries == 1:
            raise
        return _warmed_up(num_tries - 1)


@pytest.fixture(scope="module")
def single() -> LLM:
    return LLM("demo", dtype="float32", seed=0)


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", seed=0, tp=2, check_ranks=5) as llm:
        yield llm


def child_pids(llm: LLM) -> list[int]:
    assert llm._engine._followers is not None
    return [child.pid for child in llm._engine._followers._children]


def test_answers_are_those_of_one_rank(single: LLM, pair: LLM) -> None:
    prompts = example_messages(30)
    for params in (None, SamplingParams(n=2, temperature=1.0, seed=5), SamplingParams(temperature=1.0, top_p=0.9)):
        answers, want = (llm.chat(prompts, params, progress=False) for llm in (pair, single))
        assert [output.outputs for output in answers] == [output.outputs for output in want]
    scored, expected = (llm.score(prompts[:4], ["42", "a word"], progress=False) for llm in (pair, single))
    for output, other in zip(scored, expected, strict=True):
        assert output.outputs[0].text == other.outputs[0].text
        found, wanted = ([choice.logprob for choice in o.outputs[0].choices or []] for o in (output, other))
        assert found == pytest.approx(wanted, abs=1e-3)


def test_rank_0_constrains_all_ranks(single: LLM, pair: LLM) -> None:
    """Some rows of a step are constrained, some look at the whole vocabulary, some fail."""
    asked: list[dict[str, Any]] = [{"json": random_schema(), "disable_any_whitespace": True} for _ in range(8)]
    asked += [{"choice": ["a", "bc"]}, {"grammar": 'start: "a" B\nB: /[^\\x00-\\U0010FFFF]/'}]
    params = [
        SamplingParams(structured_outputs=given, max_tokens=100, temperature=1.0, seed=i, top_p=1 - i % 2 / 10)  # type: ignore[arg-type]
        for i, given in enumerate(asked)
    ]
    params += [SamplingParams(max_tokens=20, min_tokens=20)] * 2
    answers, want = (llm.generate(["What is 17 + 25?"] * 12, params, progress=False) for llm in (pair, single))
    assert [output.outputs for output in answers] == [output.outputs for output in want]
    for output, given in zip(answers[:8], asked, strict=False):
        assert fits(json.loads(output.outputs[0].text), given["json"])
    assert [output.outputs[0].finish_reason for output in answers[8:]] == ["stop", "error", "length", "length"]


def test_leaving_a_stream_ends_its_requests_on_all_ranks(pair: LLM) -> None:
    for _ in pair.stream([MESSAGES] * 3, ENDLESS):
        break
    assert pair.stats().num_running == 0
    assert pair.chat(MESSAGES, progress=False)[0].outputs[0].text == "42"


def test_the_channel_of_ticks_has_no_limits(tmp_path: Path) -> None:
    here, there = places_on_this_host(2, tmp_path)
    store = open_store(RankPlace(rank=0, size=1, meet=here.meet, num_local=1))
    receiver = TickReceiver(there, store)
    sender = TickSender(here, store)
    for socket in (receiver._inbox, *sender._followers):
        options = (zmq.SNDHWM, zmq.RCVHWM, zmq.RCVTIMEO, zmq.SNDTIMEO)
        assert [socket.getsockopt(option) for option in options] == [0, 0, -1, -1]
    for number in range(5000):  # more than any default high-water mark
        sender.send(str(number).encode())
    assert [receiver.receive() for _ in range(5000)] == [str(number).encode() for number in range(5000)]
    sender._next += 1
    sender.send(b"")
    with pytest.raises(RankLostError, match="tick 5001 came in place of tick 5000"):
        receiver.receive()
    sender.close()
    receiver.close()


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen by the others", "by none"])
def test_a_follower_that_dies_is_named_and_the_others_end(is_seen: bool) -> None:
    with LLM("demo", dtype="float32", tp=4) as llm:
        pids = child_pids(llm)
        stream = llm.stream([MESSAGES] * 4, ENDLESS)
        next(stream)
        if not is_seen:
            os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match="rank 2 was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - started < DEATH_S
        with pytest.raises(WorkerError, match=r"make a new one: .*rank 2 was killed"):
            llm.generate("more", progress=False)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A program with a follower, whose process id it prints; it generates once it is told to."""
    program = (
        "from minisgl_batch import LLM, SamplingParams; llm = LLM('demo', tp=2)\n"
        "print(*[child.pid for child in llm._engine._followers._children], flush=True); input()\n"
        "for event in llm.stream('a', SamplingParams(max_tokens=2000, ignore_eos=True)): print(event, flush=True)\n"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment()) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("parent")  # it starts while this one waits
def test_a_follower_that_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "SILENT_S", 3.0)
    with LLM("demo", dtype="float32", tp=2) as llm:
        assert llm.chat(MESSAGES, progress=False)[0].outputs[0].text == "42"
        os.kill(child_pids(llm)[0], signal.SIGSTOP)
        with pytest.raises(WorkerError, match="rank 1 hangs: silent for 3 s"):
            llm.generate(MESSAGES, ENDLESS, progress=False)


def test_what_rank_0_refuses_by_itself_is_not_blamed_on_a_follower_that_refuses_it_too() -> None:
    others = followers.Followers.__new__(followers.Followers)  # without processes
    others._failed = Future()
    others._failed.set_result("rank 1: tp: of rank 1")
    with pytest.raises(InvalidParameterError, match="of rank 0"), others.blamed():
        raise InvalidParameterError("tp", "of rank 0")
    with pytest.raises(WorkerError, match="of rank 1"), others.blamed():
        raise RankLostError("what came of it")


def test_a_follower_that_can_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "FOLLOWER", "no.such.module")
    with pytest.raises(WorkerError, match="rank 1 ended with exit code 1"):
        LLM("demo", tp=2)


def test_followers_die_with_their_parent(parent: subprocess.Popen[bytes]) -> None:
    assert parent.stdin is not None
    assert parent.stdout is not None
    (pid,) = map(int, parent.stdout.readline().split())
    parent.stdin.write(b"\n")
    parent.stdin.flush()
    assert b"StreamEvent" in parent.stdout.readline()
    assert psutil.pid_exists(pid)
    parent.kill()
    wait_for("the follower's end", lambda: not psutil.pid_exists(pid), DEATH_S)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "demo", "tp": 3}, InvalidParameterError, "tp: 3 ranks .* valid sizes: 1, 2, 4, 8"),
        ({"model": "demo", "tp": 0}, InvalidParameterError, "tp: must be between 1 and"),
        ({"model": "demo", "tp": 2, "num_pages": 2, "max_seq_len": 64}, InvalidParameterError, "don't fit"),
        ({"model": "/no/such/folder", "tp": 2}, ModelError, "/no/such/folder"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(**options)  # type: ignore[arg-type]


def test_idle_ranks_wait_longer_than_any_limit_and_one_that_dies_is_named(idle: tuple[LLM, float]) -> None:
    llm, since = idle
    time.sleep(max(0.0, since + IDLE_S - time.monotonic()))  # what is tested
    assert llm.chat(MESSAGES, progress=False)[0].outputs[0].text == "42"
    os.kill(child_pids(llm)[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        llm.generate(MESSAGES, ENDLESS, progress=False)
