"""Ctrl-C while the in-process LLM generates: the call ends, and the engine goes on. In processes of their own."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.errors import WorkerError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.interrupts import interrupts_held
from tests.minisgl_batch.test_llm import example_messages
from tests.processes import run_python

INTERRUPTED = """
import json, os, signal, threading, time
from minisgl_batch import LLM, SamplingParams

def interrupt(num_steps):
    while llm.stats().num_steps < num_steps:
        time.sleep(0.001)
    os.killpg(0, signal.SIGINT)  # as a terminal does: followers get it, too

os.setsid()
llm = LLM("demo", dtype="float32", seed=0, tp={tp})
for num_steps in {steps}:
    waiting = threading.Thread(target=interrupt, args=(llm.stats().num_steps + num_steps,))
    waiting.start()
    try:
        llm.generate(["a", "b", "c"], SamplingParams(n=3, max_tokens=2000, ignore_eos=True), progress=False)
    except KeyboardInterrupt:
        waiting.join()
    else:
        raise SystemExit("it wasn't interrupted")
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0, stats
    assert not llm._outputs._live
outputs = llm.chat({chats}, SamplingParams(temperature=1.0, seed=3, max_tokens=30), progress=False)
print(json.dumps([output.outputs[0].text for output in outputs]))
llm.close()
"""


@pytest.fixture
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("tp", [1, 2])
def test_calls_after_an_interrupted_one_are_as_if_it_had_not_been(tp: int) -> None:
    chats, steps = example_messages(12), [random.randint(1, 60) for _ in range(4)]
    found = json.loads(run_python(INTERRUPTED.format(tp=tp, steps=steps, chats=repr(chats))))
    with LLM("demo", dtype="float32", seed=0, tp=tp) as untouched:
        outputs = untouched.chat(chats, SamplingParams(temperature=1.0, seed=3, max_tokens=30), progress=False)
    assert found == [output.outputs[0].text for output in outputs]


@pytest.mark.usefixtures("default_handler")
def test_the_first_interrupt_waits_and_the_second_does_not() -> None:
    def interrupted(num_interrupts: int) -> None:
        with interrupts_held():
            for number in range(num_interrupts):
                signal.raise_signal(signal.SIGINT)
                passed.append(number)

    for num_interrupts in (1, 2):
        passed = list[int]()
        with pytest.raises(KeyboardInterrupt):
            interrupted(num_interrupts)
        assert passed == [0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_handlers_of_others_and_other_threads_are_left_alone() -> None:
    came = []

    def own(number: int, _frame: object) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, own)
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = []

    def run() -> None:
        with interrupts_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_step_that_was_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def left() -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    with LLM("demo") as llm:
        monkeypatch.setattr(llm._engine, "_loop", left())
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", SamplingParams(max_tokens=1), progress=False)
        with pytest.raises(WorkerError, match=r"make a new one: a step was left by KeyboardInterrupt$"):
            llm.generate("a", progress=False)


def test_a_check_that_was_left_answers_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(*_: object) -> None:
        raise KeyboardInterrupt

    check = GrammarCheck()
    with monkeypatch.context() as patch:
        patch.setattr("select.select", left)
        with pytest.raises(KeyboardInterrupt):
            check.problem("start: nothing")
    assert check.problem('start: "a"') == ""
    check.close()
