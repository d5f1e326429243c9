"""Compiles the grammars of constrained prompts, in threads, before the scheduler sees the prompts.

A prompt comes once its grammar is ready; others don't wait for it. One whose grammar can't be used is refused. A
grammar is first checked in a process of its own, which bounds what it may take. For many rows it is compiled again, in
a thread for which nothing waits. Rank 0's: between the frontend and the scheduler, so that all ranks see a prompt in
the same tick.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from minisgl_batch.grammar_check import GrammarCheck, limits, shown
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
from minisgl_batch.scheduler.lexers import Grammar
from minisgl_batch.scheduler.source import MessageSource

NUM_THREADS = 8  # on one processor, too: they wait for their processes, which share it, so that none waits for another
MAX_KEPT = 64  # grammars, of those last used
POLL_S = 0.01
_CHAR = r'[^"\\\x00-\x1F\x7F]'
# Tokens by what they are in a JSON string, in llguidance's slices and one of 16 characters: a slice that a state takes
# as a whole costs nothing. Few tokens are longer, so that strings that end soon cost more only in their last 16.
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHAR}{{1,{size}}}" for size in (10, 16, 30)), f"{_CHAR}+"]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar, or why there is none."""

    grammar: Grammar | None
    problem: str = ""


class CompilingSource:
    """See the module's docstring."""

    def __init__(self, frontend: MessageSource, constraints: Constraints) -> None:
        self._frontend = frontend
        self._constraints = constraints
        self._waiting: list[tuple[NewPrompt, Future[_Compiled]]] = []
        self._grammars: OrderedDict[str, Future[_Compiled]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._adding = ThreadPoolExecutor(1, "lexers")
        self._tokenizer: Future[Any] | None = None
        self._local = threading.local()
        self._checks: list[GrammarCheck] = []

    def receive(self, *, block: bool) -> list[ToEngine]:
        """What has come and can be served; with `block`, waits until there is something, or something was refused."""
        while True:
            messages = self._frontend.receive(block=block and not self._waiting)
            passed = [message for given in messages if (message := self._take(given)) is not None]
            ready, has_refused = self._take_ready()
            passed += ready
            if passed or has_refused or not block:
                return passed
            wait([grammar for _, grammar in self._waiting], POLL_S, FIRST_COMPLETED)

    def send(self, message: FromEngine) -> None:
        self._frontend.send(message)

    def close(self) -> None:
        """End the threads and the processes; waits for a grammar that is being compiled."""
        self._adding.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for check in self._checks:
            check.close()

    def _take(self, message: ToEngine) -> ToEngine | None:
        """The message, without what has to wait."""
        match message:
            case SetVocabulary():
                self._pool = self._pool or ThreadPoolExecutor(NUM_THREADS, "grammar")
                self._tokenizer = self._pool.submit(_tokenizer, message)
                self._constraints.set_vocabulary(message.vocab_size, message.eos_ids)
                return None
            case AddRequests():
                free = [prompt for prompt in message.prompts if prompt.constraint is None]
                self._waiting += [
                    (prompt, self._compiled(prompt.constraint.grammar))
                    for prompt in message.prompts
                    if prompt.constraint is not None
                ]
                return AddRequests(free) if free else None
            case AbortRequests():
                self._drop(set(message.uids))
        return message

    def _take_ready(self) -> tuple[list[ToEngine], bool]:
        """Prompts whose grammar is compiled, and whether some were refused."""
        if not any(grammar.done() for _, grammar in self._waiting):
            return [], False
        ready, refused, waiting = list[NewPrompt](), list[tuple[int, str]](), list[tuple[NewPrompt, Any]]()
        for prompt, compiled in self._waiting:
            if not compiled.done():
                waiting.append((prompt, compiled))
            elif problem := compiled.result().problem:
                refused += [(request.uid, f"structured_outputs: {problem}") for request in prompt.requests]
            else:
                ready.append(self._begin(prompt, compiled.result().grammar))
        self._waiting = waiting
        if refused:
            self.send(RequestsRefused(refused, "invalid_request"))
        return [AddRequests(ready)] if ready else [], bool(refused)

    def _begin(self, prompt: NewPrompt, grammar: Grammar | None) -> NewPrompt:
        """The prompt as the ranks get it."""
        assert prompt.constraint is not None
        assert grammar is not None
        constraint = msgspec.structs.replace(prompt.constraint, grammar="")
        for request in prompt.requests:
            self._constraints.add(request.uid, grammar, constraint)
        for _ in range(grammar.order()):
            self._adding.submit(grammar.add_lexer)
        return msgspec.structs.replace(prompt, constraint=constraint)

    def _drop(self, uids: set[int]) -> None:
        left = [
            (msgspec.structs.replace(prompt, requests=[new for new in prompt.requests if new.uid not in uids]), grammar)
            for prompt, grammar in self._waiting
        ]
        self._waiting = [(prompt, grammar) for prompt, grammar in left if prompt.requests]
        # Others' grammars needn't wait for those that nobody waits for any more.
        wanted = {id(grammar) for _, grammar in self._waiting}
        unwanted = {id(grammar) for _, grammar in left if id(grammar) not in wanted and grammar.cancel()}
        for text in [text for text, grammar in self._grammars.items() if id(grammar) in unwanted]:
            del self._grammars[text]

    def _compiled(self, grammar: str) -> Future[_Compiled]:
        compiled = self._grammars.get(grammar)
        if compiled is None:
            assert self._pool is not None, "a constrained prompt came before the vocabulary"
            compiled = self._grammars[grammar] = self._pool.submit(self._compile, grammar)
            if len(self._grammars) > MAX_KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        return compiled

    def _compile(self, grammar: str) -> _Compiled:
        check: GrammarCheck | None = getattr(self._local, "check", None)
        if check is None:
            check = self._local.check = GrammarCheck()
            self._checks.append(check)
        assert self._tokenizer is not None
        if problem := check.problem(grammar):
            return _Compiled(None, problem)
        try:
            tokenizer = self._tokenizer.result()
        except ValueError as error:
            return _Compiled(None, f"llguidance can't use this model's tokenizer: {shown(str(error))}")
        compiled = Grammar(partial(_matcher, tokenizer, grammar))
        return _Compiled(compiled, shown(compiled.problem))


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
