"""Grammars on their way: checked, compiled once there is room, and kept a while for prompts that come later.

A lane bounds how long a check may take, and how many lexers there are at a time, since each takes memory: beyond that,
checked grammars wait until rows of others end. Knows no prompts. Used by `compiling`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakSet

from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.scheduler.lexers import Grammar

NUM_COMPILERS = 2  # they wait for nothing but processors


@dataclass(frozen=True)
class LaneLimits:
    """What a lane has room for.

    Attributes:
        cpu_s: processor time of a check.
        num_checks: at a time, each with a process of its own.
        num_lexers: of all grammars that rows have or that are kept.
        num_kept: grammars, of those last used.
    """

    cpu_s: float
    num_checks: int
    num_lexers: int
    num_kept: int


class Wish:
    """A grammar that somebody waits for.

    Attributes:
        is_over: nobody does any more.
        is_checked: it was sent to be compiled.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_over = self.is_checked = False


W = TypeVar("W", bound=Wish)


class Lane(Generic[W]):
    """See the module's docstring. For one thread.

    Args:
        make: compiles a grammar's text, or says why it can't; called in threads.
        done: gets a wish and the future of a problem (of a check, "" for none) or a grammar; called in threads.
    """

    def __init__(
        self,
        limits: LaneLimits,
        make: Callable[[str], str | Grammar],
        done: Callable[[W, Future[str | Grammar]], None],
    ) -> None:
        self.limits = limits
        self._make = make
        self._done = done
        self._checking = ThreadPoolExecutor(limits.num_checks, "grammar-check")
        self._compiling = ThreadPoolExecutor(NUM_COMPILERS, "grammar")
        self._local = threading.local()
        self._checks: list[GrammarCheck] = []
        self._checked: deque[W] = deque()
        self._num_compiling = 0
        self._grammars: WeakSet[Grammar] = WeakSet()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    @property
    def num_free(self) -> int:
        """How many more lexers there may be."""
        return self.limits.num_lexers - self._num_compiling - sum(grammar.num_lexers for grammar in self._grammars)

    def find(self, text: str) -> Grammar | None:
        """A grammar that is kept."""
        grammar = self._kept.get(text)
        if grammar is not None:
            self._kept.move_to_end(text)
        return grammar

    def check(self, wish: W) -> None:
        """Find out what is wrong with a grammar."""
        self._submit(self._checking, self._check, wish)

    def compile(self, wish: W) -> None:
        """Compile a grammar that was checked, once `go_on` finds room."""
        wish.is_checked = True
        self._checked.append(wish)

    def go_on(self) -> None:
        """Compile what waits, as far as there is room by now."""
        while self._checked and (self._checked[0].is_over or self.num_free > 0):
            wish = self._checked.popleft()
            if not wish.is_over:
                self._num_compiling += 1
                self._submit(self._compiling, lambda wish: self._make(wish.text), wish)

    def take(self, wish: W, grammar: Grammar | None) -> None:
        """What was compiled has come; a grammar that can be used is kept."""
        self._num_compiling -= 1
        if grammar is not None:
            self._grammars.add(grammar)
            self._kept[wish.text] = grammar
            if len(self._kept) > self.limits.num_kept:
                self._kept.popitem(last=False)

    def close(self) -> None:
        """End the threads and the processes; waits for a grammar that is being compiled."""
        for pool in (self._checking, self._compiling):
            pool.shutdown(cancel_futures=True)
        for check in self._checks:
            check.close()

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[W], str | Grammar], wish: W) -> None:
        pool.submit(work, wish).add_done_callback(lambda future: self._done(wish, future))

    def _check(self, wish: W) -> str:
        if wish.is_over:
            return ""
        check: GrammarCheck | None = getattr(self._local, "check", None)
        if check is None:
            check = self._local.check = GrammarCheck()
            self._checks.append(check)
        # Others needn't wait for one that nobody waits for any more.
        return check.problem(wish.text, cpu_s=self.limits.cpu_s, is_wanted=lambda: not wish.is_over)
