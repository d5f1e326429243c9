"""Tells the reasoning of a text from its answer, by the marks that models write around it.

A text is a lead (white space and the opening mark), the reasoning, the closing mark between white space, and the
answer. Knows nothing of tokens. Called by the output side of the tokenizer, and by readers of results.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Marks(NamedTuple):
    """What a model writes around its reasoning.

    Attributes:
        opening, closing: before and behind it.
        answering: what a text without reasoning begins with, and which is no part of the answer; "" for nothing.
        tokens: special tokens that these are made of; they are then headers of messages.
        has_calls: a message to a recipient ends reasoning, too, and is the answer, with its header.
    """

    opening: str
    closing: str
    answering: str = ""
    tokens: frozenset[str] = frozenset()
    has_calls: bool = False


THINK = Marks("<think>", "</think>")
# gpt-oss writes messages to channels. What it writes before the final one, or a call, is reasoning, headers in between
# included.
HARMONY = Marks(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|channel|>final<|message|>",
    frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}),
    has_calls=True,
)
_END = "<|end|>"  # of a message, with which the header of the next one begins
_AUTHOR = f"{_END}<|start|>assistant"  # before a call; that of a first message is in the prompt
# A header that has begun at a text's beginning, and one behind a message, which may be whole. What is longer is none.
_BEGUN_HEADER = re.compile(r"<\|channel\|>(?:(?!<\|message\|>).){0,300}\Z", re.DOTALL)
_NEXT_HEADER = re.compile(r"<\|end\|>(?:(?!<\|end\|>).){0,300}?(<\|message\|>|\Z)", re.DOTALL)
_LEAD = re.compile(rf"\s*(?:{re.escape(THINK.opening)}|{re.escape(HARMONY.opening)})?\s*")


class Reasoning(NamedTuple):
    """Where the parts of a text are, as far as it is known: characters [start, end) are reasoning, the answer is
    [answer, ...); what is in neither are marks and the white space around them."""

    start: int
    end: int
    answer: int

    def split(self, text: str, offset: int = 0) -> tuple[str, str]:
        """What of a piece of the text, which begins at `offset`, is reasoning, and what is answer."""
        reasoning = text[max(0, self.start - offset) : max(0, self.end - offset)]
        return reasoning, text[max(0, self.answer - offset) :]


def find_reasoning(raw_text: str, reasoning_text: str, text: str) -> Reasoning:
    """Where a whole text has the parts that it was split into."""
    lead = _LEAD.match(raw_text)
    start = lead.end() if lead is not None else 0
    return Reasoning(start, start + len(reasoning_text), len(raw_text) - len(text))


class ReasoningSplitter:
    """Releases a text that comes in pieces once it is known what it is.

    What it finds depends on the text alone, never on where the pieces were cut.
    """

    __slots__ = ("_answer", "_end", "_held", "_marks", "_num_released", "_opened", "_start", "_state")

    def __init__(self, *, opened: bool, marks: Marks = THINK) -> None:
        """`opened`: the prompt has the opening mark already; one at the beginning of the text is passed over."""
        self._opened = opened
        self._marks = marks
        self._state = "lead"
        self._held = ""
        self._num_released = 0
        self._start = self._end = self._answer = 0

    @property
    def num_released(self) -> int:
        """Characters released so far."""
        return self._num_released

    @property
    def found(self) -> Reasoning:
        """Of the text that was released."""
        answer = self._answer if self._state == "answer" else self._num_released
        return Reasoning(self._start, self._end, answer)

    def push(self, text: str) -> str:
        """Take more text; returns what is released by it."""
        self._held += text
        released = self._lead() if self._state == "lead" else ""
        released += self._reasoning() if self._state == "reasoning" else ""
        released += self._gap() if self._state == "gap" else ""
        released += self._release(len(self._held)) if self._state == "answer" else ""
        return released

    def flush(self) -> str:
        """What was held back, now that no more follows."""
        begun = self._held.lstrip()
        if self._state == "lead" and not self._mark(begun) and not self._is_begun_header(begun):
            self._state = "reasoning" if self._opened else "answer"
            self._start = self._end = len(self._held) - len(begun) if self._opened else 0
        elif self._state == "lead":
            self._start = self._end = len(self._held)
        if self._state == "reasoning":
            inside = self._held[: self._find_closing(is_last=True)[0]].rstrip()
            self._end = max(self._start, self._num_released + len(inside))
        return self._release(len(self._held))

    def _lead(self) -> str:
        """Up to where the reasoning begins, or "" while that isn't known."""
        begun = self._held.lstrip()
        if self._marks.opening.startswith(begun) or self._marks.answering.startswith(begun):
            return ""  # also while there is nothing but white space, or the mark without what follows it
        if self._is_begun_header(begun):
            return ""
        mark = self._mark(begun)
        if not mark and not self._opened:
            self._state = "answer"  # of a text without reasoning, white space included
            return ""
        begun = begun.removeprefix(mark).lstrip()
        if not begun:
            return ""
        released = self._release(len(self._held) - len(begun))
        if mark and mark == self._marks.answering:
            self._state, self._answer = "answer", self._num_released
        else:
            self._state, self._start, self._end = "reasoning", self._num_released, self._num_released
        return released

    def _mark(self, begun: str) -> str:
        """The mark that a text begins with, or ""."""
        marks = (self._marks.opening, self._marks.answering)
        return next((mark for mark in marks if begun.startswith(mark)), "")

    def _is_begun_header(self, begun: str) -> bool:
        """It is one of a first message, and not all of it."""
        return bool(self._marks.tokens) and _BEGUN_HEADER.match(begun) is not None

    def _reasoning(self) -> str:
        """Up to the end of the mark that closes it, or what can't be part of it or of the white space before it."""
        at, end, self._state = self._find_closing()
        inside = len(self._held[:at].rstrip())
        if inside:
            self._end = self._num_released + inside
        if self._state == "reasoning":
            return self._release(inside)
        released = self._release(end)
        self._answer = self._num_released  # with "gap", further on
        return released

    def _find_closing(self, *, is_last: bool = False) -> tuple[int, int, str]:
        """Where the mark that closes reasoning begins and ends, and the state behind it; this one while it isn't whole.

        The beginning of a header is no reasoning, though it is the last; that of another mark is.
        """
        mark = closing = self._marks.closing
        if self._marks.tokens:
            mark = _END
            for header in _NEXT_HEADER.finditer(self._held):
                if header[0] == closing:
                    return *header.span(), "gap"
                if not header[1]:
                    return header.start(), header.start(), "reasoning"
                if self._marks.has_calls and header[0].startswith(_AUTHOR) and " to=" in header[0]:
                    return header.start(), header.start() + len(_AUTHOR), "answer"
        elif (at := self._held.find(closing)) >= 0:
            return at, at + len(closing), "gap"
        at = len(self._held) - (0 if is_last else _beginning_at_end(self._held, mark))
        return at, at, "reasoning"

    def _gap(self) -> str:
        """The white space behind the closing mark."""
        num_blank = len(self._held) - len(self._held.lstrip())
        has_answer = num_blank < len(self._held)
        released = self._release(num_blank)
        if has_answer:
            self._state, self._answer = "answer", self._num_released
        return released

    def _release(self, num_chars: int) -> str:
        released, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_released += num_chars
        return released


def _beginning_at_end(text: str, mark: str) -> int:
    """Length of the longest beginning of `mark`, short of all of it, that `text` ends with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
