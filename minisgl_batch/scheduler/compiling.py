"""Compiles the grammars of constrained prompts, in threads, before the scheduler sees the prompts.

A prompt comes once its grammar is ready; others don't wait for it. One whose grammar can't be used is refused. A
grammar is first checked in a process of its own, which bounds what it may take; those for which a moment isn't enough
go to a lane of their own, where they hold up no others. For many rows a grammar is compiled again, in a thread for
which nothing waits. Rank 0's: between the frontend and the scheduler, so that all ranks see a prompt in the same tick.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from minisgl_batch.grammar_check import CPU_S, TOO_COMPLEX, limits, shown
from minisgl_batch.messages import (
    AbortRequests,
    AddRequests,
    FromEngine,
    NewPrompt,
    RequestsRefused,
    SetVocabulary,
    ToEngine,
)
from minisgl_batch.scheduler.constraints import Constraints
from minisgl_batch.scheduler.lane import Lane, LaneLimits, Wish
from minisgl_batch.scheduler.lexers import Grammar
from minisgl_batch.scheduler.source import MessageSource

# A schema of 128 KiB is checked in less. A lexer takes up to 40 MiB for each second that its check took.
QUICK = LaneLimits(cpu_s=0.1, num_checks=8, num_lexers=512, num_kept=64)
SLOW = LaneLimits(cpu_s=CPU_S, num_checks=4, num_lexers=24, num_kept=4)
MAX_PROBLEMS = 64  # that are remembered, of grammars that can't be used
POLL_S = 0.01
PATIENCE_S = 0.1  # then the caller may look for other things, such as an interrupt
_CHAR = r'[^"\\\x00-\x1F\x7F]'
# Tokens by what they are in a JSON string, in llguidance's slices and one of 16 characters: a slice that a state takes
# as a whole costs nothing. Few tokens are longer, so that strings that end soon cost more only in their last 16.
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHAR}{{1,{size}}}" for size in (10, 16, 30)), f"{_CHAR}+"]


class _Waiting(Wish):
    """A grammar, the prompts that wait for it, and the lane in which it is."""

    def __init__(self, text: str, lane: Lane[_Waiting]) -> None:
        super().__init__(text)
        self.lane = lane
        self.prompts: list[NewPrompt] = []


class CompilingSource:
    """See the module's docstring."""

    def __init__(self, frontend: MessageSource, constraints: Constraints) -> None:
        self._frontend = frontend
        self._constraints = constraints
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_of: dict[int, _Waiting] = {}  # by uid
        self._refused: list[tuple[int, str]] = []  # and yet to be told
        self._problems: OrderedDict[str, str] = OrderedDict()
        self._done: SimpleQueue[tuple[_Waiting, Future[str | Grammar]]] = SimpleQueue()
        self._quick, self._slow = (
            Lane[_Waiting](limits, self._compile, lambda *done: self._done.put(done)) for limits in (QUICK, SLOW)
        )
        self._adding = ThreadPoolExecutor(1, "lexers")
        self._tokenizer: Future[Any] | None = None

    def receive(self, *, block: bool) -> list[ToEngine]:
        """What has come and can be served; with `block`, waits until there is something, or something was refused.

        While grammars are compiled it waits for a moment only.
        """
        until = wait_s = 0.0
        while True:
            messages = self._frontend.receive(block=block and not self._waiting)
            until = until or time.monotonic() + PATIENCE_S
            passed = [message for given in messages if (message := self._take(given)) is not None]
            if ready := self._take_compiled(wait_s):
                passed.append(AddRequests(ready))
            refused, self._refused = self._refused, []
            if refused:
                self.send(RequestsRefused(refused, "invalid_request"))
            if passed or refused or not block or time.monotonic() > until:
                return passed
            wait_s = POLL_S

    def send(self, message: FromEngine) -> None:
        self._frontend.send(message)

    def close(self) -> None:
        """End the threads and the processes; waits for a grammar that is being compiled."""
        for waiting in self._waiting.values():
            waiting.is_over = True
        self._adding.shutdown(cancel_futures=True)
        self._quick.close()
        self._slow.close()

    def _take(self, message: ToEngine) -> ToEngine | None:
        """The message, without what has to wait."""
        match message:
            case SetVocabulary():
                self._tokenizer = self._adding.submit(_tokenizer, message)
                self._constraints.set_vocabulary(message.vocab_size, message.eos_ids)
                return None
            case AddRequests():
                ready = self._take_prompts(message.prompts)
                return AddRequests(ready) if ready else None
            case AbortRequests():
                self._drop(message.uids)
        return message

    def _take_prompts(self, prompts: Iterable[NewPrompt]) -> list[NewPrompt]:
        """Those that needn't wait."""
        ready: list[NewPrompt] = []
        known: dict[Grammar, Lane[_Waiting]] = {}
        for prompt in prompts:
            if prompt.constraint is None:
                ready.append(prompt)
            elif (found := self._find(prompt.constraint.grammar)) is None:
                self._let_wait(prompt, prompt.constraint.grammar)
            else:
                grammar, known[grammar] = found
                ready.append(self._begin(prompt, grammar))
        for grammar, lane in known.items():
            self._order_lexers(grammar, lane)
        return ready

    def _find(self, text: str) -> tuple[Grammar, Lane[_Waiting]] | None:
        """A grammar that is kept, and by which lane."""
        for lane in (self._quick, self._slow):
            if (grammar := lane.find(text)) is not None:
                return grammar, lane
        return None

    def _let_wait(self, prompt: NewPrompt, text: str) -> None:
        if text in self._problems:
            self._refuse(prompt, self._problems[text])
            return
        waiting = self._waiting.get(text)
        if waiting is None:
            assert self._tokenizer is not None, "a constrained prompt came before the vocabulary"
            waiting = self._waiting[text] = _Waiting(text, self._quick)
            waiting.lane.check(waiting)
        waiting.prompts.append(prompt)
        self._waiting_of.update((request.uid, waiting) for request in prompt.requests)

    def _take_compiled(self, wait_s: float) -> list[NewPrompt]:
        """Prompts whose grammar is there by now; waits for one that is done, and sees to those that aren't."""
        ready: list[NewPrompt] = []
        with suppress(Empty):
            while True:
                waiting, future = self._done.get(block=wait_s > 0, timeout=wait_s)
                wait_s = 0.0
                if (grammar := self._take_done(waiting, future.result())) is not None:
                    ready += [self._begin(prompt, grammar) for prompt in self._end(waiting)]
                    self._order_lexers(grammar, waiting.lane)
        self._quick.go_on()
        self._slow.go_on()
        return ready

    def _take_done(self, waiting: _Waiting, found: str | Grammar) -> Grammar | None:
        """What a lane found out: a grammar, or what is wrong with it; answers one that prompts wait for."""
        grammar, problem = (None, found) if isinstance(found, str) else (found, shown(found.problem))
        if waiting.is_checked:
            waiting.lane.take(waiting, None if problem else grammar)
        if waiting.is_over:
            return None
        if problem == TOO_COMPLEX and waiting.lane is self._quick:
            waiting.lane = self._slow
            waiting.lane.check(waiting)
        elif problem:
            for prompt in self._end(waiting):
                self._refuse(prompt, problem)
            self._problems[waiting.text] = problem
            if len(self._problems) > MAX_PROBLEMS:
                self._problems.popitem(last=False)
        elif grammar is None:
            waiting.lane.compile(waiting)
        return None if problem else grammar

    def _end(self, waiting: _Waiting) -> list[NewPrompt]:
        """Nobody waits for it any more; answers who did."""
        waiting.is_over = True
        del self._waiting[waiting.text]
        for prompt in waiting.prompts:
            for request in prompt.requests:
                del self._waiting_of[request.uid]
        return waiting.prompts

    def _refuse(self, prompt: NewPrompt, problem: str) -> None:
        self._refused += [(request.uid, f"structured_outputs: {problem}") for request in prompt.requests]

    def _begin(self, prompt: NewPrompt, grammar: Grammar) -> NewPrompt:
        """The prompt as the ranks get it."""
        assert prompt.constraint is not None
        constraint = msgspec.structs.replace(prompt.constraint, grammar="")
        for request in prompt.requests:
            self._constraints.add(request.uid, grammar, constraint)
        return msgspec.structs.replace(prompt, constraint=constraint)

    def _order_lexers(self, grammar: Grammar, lane: Lane[_Waiting]) -> None:
        """Those that it lacks for its rows, as far as half of the lane's room is left for other grammars."""
        for _ in range(grammar.order(lane.num_free - lane.limits.num_lexers // 2)):
            self._adding.submit(grammar.add_lexer)

    def _drop(self, uids: Iterable[int]) -> None:
        dropped: dict[_Waiting, set[int]] = {}
        for uid in uids:
            if (waiting := self._waiting_of.get(uid)) is not None:
                dropped.setdefault(waiting, set()).add(uid)
        for waiting, gone in dropped.items():
            waiting.prompts = [
                msgspec.structs.replace(prompt, requests=[new for new in prompt.requests if new.uid not in gone])
                for prompt in waiting.prompts
            ]
            waiting.prompts = [prompt for prompt in waiting.prompts if prompt.requests]
            for uid in gone:
                del self._waiting_of[uid]
            if not waiting.prompts:
                self._end(waiting)

    def _compile(self, text: str) -> str | Grammar:
        """In a thread: a grammar that was checked, or why there is none."""
        assert self._tokenizer is not None
        try:
            tokenizer = self._tokenizer.result()
        except ValueError as error:
            return f"llguidance can't use this model's tokenizer: {shown(str(error))}"
        return Grammar(partial(_matcher, tokenizer, text))


def _matcher(tokenizer: Any, grammar: str) -> Any:
    """An LLMatcher with a lexer of its own."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    matcher.compute_bitmask()  # what it learns is copied with it
    return matcher


def _tokenizer(vocabulary: SetVocabulary) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(
        vocabulary.tokenizer,
        n_vocab=vocabulary.vocab_size,
        eos_token=list(vocabulary.eos_ids),
        slices=SLICES,
    )
