"""A compiled grammar: matchers at its beginning, of several lexers, from which its rows go on.

llguidance's copies of a matcher share its lexer. What one of them has learnt, all know; but the lexer has a lock, so
that their masks are made one after the other, and a lexer that comes to its limits ends them all. So the more rows a
grammar has, the more lexers it gets, and one that is worn out gives way to another. `compiling` makes grammars and sees
to it that they have their lexers; `constraints` takes the rows' matchers from them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ROWS_PER_LEXER = 8  # so few that one thread soon has their masks
MAX_LEXERS = min(2 * (os.cpu_count() or 1), 32)  # each learns for itself: more would learn more than they save
_WORN_OUT = "lexer error"


def is_worn_out(matcher: Any) -> bool:
    """Whether it failed since its lexer came to its limits, to which other rows may have brought it."""
    return str(matcher.get_error()).startswith(_WORN_OUT)


class Lexer:
    """A lexer and how many rows have it.

    Attributes:
        matcher: llguidance's LLMatcher, at the grammar's beginning.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.num_rows = 0


class Grammar:
    """See the module's docstring. For one thread, `add_lexer` for any."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """Compile it for the first time.

        Args:
            make: compiles it to an LLMatcher with a lexer of its own.
        """
        self._make = make
        self._lexers = [Lexer(make())]
        self._num_ordered = 1
        self._num_rows = self._num_begun = 0

    @property
    def problem(self) -> str:
        """Why it couldn't be compiled, as llguidance says it, "" if it could."""
        problem: str = self._lexers[0].matcher.get_error()
        return problem

    def expect(self) -> None:
        """A row more, which is yet to begin."""
        self._num_rows += 1

    @property
    def num_lexers(self) -> int:
        """Those that there are or will be."""
        return self._num_ordered

    def order(self, at_most: int) -> int:
        """How many times more `add_lexer` has to be called, for the rows that there are now."""
        num_new = max(0, min(at_most, self._num_wanted() - self._num_ordered))
        self._num_ordered += num_new
        return num_new

    def add_lexer(self) -> None:
        self._lexers.append(Lexer(self._make()))

    def begin(self) -> tuple[Any, Lexer]:
        """A row's matcher, and its lexer: the one that the fewest rows have."""
        lexer = min(self._lexers, key=lambda lexer: lexer.num_rows)
        lexer.num_rows += 1
        self._num_begun += 1
        return lexer.matcher.deep_copy(), lexer

    def is_crowded(self, lexer: Lexer) -> bool:
        """Whether a row had better leave it and begin elsewhere, such as with a lexer that came later."""
        return lexer.num_rows * len(self._lexers) > 2 * (self._num_begun + len(self._lexers))

    def leave(self, lexer: Lexer) -> None:
        """A row that had begun ends, or begins elsewhere."""
        lexer.num_rows -= 1
        self._num_begun -= 1

    def leave_worn_out(self, lexer: Lexer) -> tuple[Any, Lexer]:
        """A row begins elsewhere, with a lexer that no other row has; none begins with the one that is worn out."""
        self.leave(lexer)
        self._drop(lexer)
        if not self._lexers:
            self._num_ordered += 1
            self.add_lexer()
        own = Lexer(self._make())
        own.num_rows = 1
        self._num_begun += 1
        return own.matcher, own

    def end(self, lexer: Lexer | None) -> None:
        """A row is gone, which had this lexer if it had begun."""
        self._num_rows -= 1
        if lexer is not None:
            self.leave(lexer)
            if not lexer.num_rows and len(self._lexers) > 2 * self._num_wanted():  # not at once: more rows may come
                self._drop(lexer)

    def _num_wanted(self) -> int:
        return min(max(1, -(-self._num_rows // ROWS_PER_LEXER)), MAX_LEXERS)

    def _drop(self, lexer: Lexer) -> None:
        if lexer in self._lexers:
            self._lexers.remove(lexer)
            self._num_ordered -= 1
