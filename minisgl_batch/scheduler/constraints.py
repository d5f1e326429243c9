"""What may come next in each constrained row: its grammar's state, and the mask of bits that it gives for a step.

Rank 0 alone has it; the other ranks get the masks. A row's text follows its grammar from the first token on, or behind
its reasoning. Where a grammar comes to a dead end, or to its limits, the row is made to end and reported as failed.
Called by the scheduler; `compiling` gives it the grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minisgl_batch.batch import IntArray
from minisgl_batch.grammar_check import shown
from minisgl_batch.messages import Constraint
from minisgl_batch.scheduler.lexers import Grammar, Lexer, is_worn_out

FAILED = "constraint_failed"
"""The error type of rows whose grammar allows no way on."""


class _Row:
    """One row's place: in the lead, where reasoning may begin, in reasoning, or in the answer.

    Attributes:
        matcher: llguidance's LLMatcher, once it was asked; a waiting row needs none.
        lexer: the matcher's.
        taken: the tokens that the matcher has taken.
        in_answer: the grammar takes every token.
        is_free: everything is allowed but to end the text: reasoning, behind which an answer has to come.
        by_grammar: what the grammar allows is allowed, and
        mark_tokens: these tokens are, as parts of a mark.
        has_failed: it was reported.
    """

    def __init__(self, grammar: Grammar, constraint: Constraint) -> None:
        self.grammar = grammar
        self.matcher: Any = None
        self.lexer: Lexer | None = None
        self.taken: list[int] = []
        self.has_failed = self.in_answer = self.is_free = self.by_grammar = False
        self.mark_tokens: list[int] = []
        self._tail: tuple[int, ...] = ()  # of the lead, or of what may end reasoning
        self._opening, self._closing = constraint.opening, constraint.closing
        self._marks = [mark for mark in (constraint.opening, constraint.answering) if mark]
        self._lead(())
        if constraint.in_reasoning:
            self._reason()
        elif not self._marks:
            self._answer()

    def needs_matcher(self) -> bool:
        return self.lexer is None or (self.grammar.is_crowded(self.lexer) and not self.has_failed)

    def begin(self) -> None:
        """With the lexer that suits best now, where the row is."""
        if self.lexer is not None:
            self.grammar.leave(self.lexer)
        self.matcher, self.lexer = self.grammar.begin()
        self.matcher.consume_tokens(self.taken)  # where that fails, so does the mask

    def ask_again(self, mask: IntArray) -> bool:
        """Fill the mask of a row that failed, if it may go on once it has a lexer of its own; whether it does."""
        if self.has_failed or not is_worn_out(self.matcher):
            return False
        assert self.lexer is not None
        self.matcher, self.lexer = self.grammar.leave_worn_out(self.lexer)
        self.matcher.consume_tokens(self.taken)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return not self.matcher.is_error()

    def take(self, token: int) -> bool:
        """The next token of a row that isn't in its answer yet; whether the grammar has to take it."""
        tail = (*self._tail, token)
        if self.is_free:
            self._tail = tail[-len(self._closing) :]
            if self._tail == self._closing:
                self._answer()
            return False
        if tail == self._opening:
            self._reason()
        elif tail in self._marks or not self._begun(tail):
            self._answer()
        else:
            self._lead(tail)
            return False
        return tail not in self._marks

    def _lead(self, tail: tuple[int, ...]) -> None:
        self._tail = tail
        self.by_grammar = not tail
        self.mark_tokens = [mark[len(tail)] for mark in self._begun(tail)]

    def _reason(self) -> None:
        self._tail = ()
        self.is_free, self.by_grammar, self.mark_tokens = True, False, []

    def _answer(self) -> None:
        self.in_answer, self.is_free, self.by_grammar, self.mark_tokens = True, False, True, []

    def _begun(self, tail: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [mark for mark in self._marks if mark[: len(tail)] == tail]


class Constraints:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._failures: list[tuple[int, str]] = []
        self._executor: Any = None
        self._all = self._ends = self._reasoning = np.empty(0, dtype=np.int32)

    def set_vocabulary(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Before the first row."""
        from llguidance import LLExecutor

        self._executor = LLExecutor()
        self._all = _mask(vocab_size, range(vocab_size))
        self._ends = _mask(vocab_size, eos_ids)
        self._reasoning = self._all & ~self._ends

    def add(self, uid: int, grammar: Grammar, constraint: Constraint) -> None:
        """A row that is at its beginning."""
        grammar.expect()
        self._rows[uid] = _Row(grammar, constraint)

    def forget(self, uids: Iterable[int]) -> None:
        """Rows that have ended; those without a constraint are passed over."""
        for uid in uids:
            if (row := self._rows.pop(uid, None)) is not None:
                row.grammar.end(row.lexer)

    def advance(self, uids: Sequence[int], tokens: Sequence[int]) -> None:
        """The next tokens of rows that go on."""
        consumed: list[tuple[_Row, int]] = []
        for uid, token in zip(uids, tokens, strict=True):
            row = self._rows.get(uid)  # at a follower there is none
            if row is not None and (row.in_answer or row.take(token)):
                row.taken.append(token)
                consumed.append((row, token))
        if consumed:
            self._executor.consume_token_par(_matchers(consumed))  # one that fails shows it at the next mask

    def fill(self, uids: Sequence[int], masks: IntArray) -> None:
        """The masks of rows' next tokens.

        Args:
            uids: the rows; of one that has ended, any mask will do.
            masks: (len(uids), num_words) int32, contiguous, to write to; as `minisgl_kernels.mask_logits` takes them.
        """
        asked: list[tuple[_Row, int]] = []
        marked: list[tuple[list[int], int]] = []
        for line, uid in enumerate(uids):  # most rows are asked and nothing else
            row = self._rows.get(uid)
            if row is None or row.is_free:
                masks[line] = self._all if row is None else self._reasoning
                continue
            if row.by_grammar:
                if row.needs_matcher():
                    row.begin()
                asked.append((row, line))
            else:
                masks[line] = 0
            if row.mark_tokens:
                marked.append((row.mark_tokens, line))
        if asked:
            num_bytes = masks.shape[1] * masks.itemsize
            self._executor.unsafe_compute_mask_ptr(_matchers(asked), masks.ctypes.data, num_bytes, len(masks))
        failed = [(row, line) for row, line in asked if row.matcher.is_error() and not row.ask_again(masks[line])]
        for tokens, line in marked:
            for token in tokens:
                _allow(masks[line], token)
        for row, line in failed:
            masks[line] = self._ends
            self._fail(uids[line], row)

    def take_failures(self) -> list[tuple[int, str]]:
        """Rows that have failed since the last call, and why."""
        failures, self._failures = self._failures, []
        return failures

    def _fail(self, uid: int, row: _Row) -> None:
        if not row.has_failed:
            row.has_failed = True
            why = f"no token can follow within the grammar ({shown(row.matcher.get_error())})"
            self._failures.append((uid, f"structured_outputs: {why}"))


def _matchers(rows: list[tuple[_Row, int]]) -> list[tuple[Any, int]]:
    """Rows' matchers, by lexers: neighbours go to the same thread, which then waits for no other's lock."""
    return [(row.matcher, number) for row, number in sorted(rows, key=lambda entry: id(entry[0].lexer))]


def _mask(vocab_size: int, tokens: Sequence[int]) -> IntArray:
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    for token in tokens:
        _allow(words, token)
    return words


def _allow(words: IntArray, token: int) -> None:
    words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
