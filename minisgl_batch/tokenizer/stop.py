"""Stop strings in text that arrives piece by piece.

Knows nothing of tokens. Called by `OutputProcessor` for rows that have stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Releases text that can't be part of a stop string, and finds the first stop string that is complete.

    What it finds depends on the text alone, never on where the pieces were cut: the stop string that ends first
    wins, and of two that end together the longer one. One that ends in text that was skipped doesn't count.
    """

    __slots__ = ("_held", "_include", "_strings")

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        """`include` keeps the stop string itself in the released text."""
        self._strings = tuple(strings)
        self._include = include
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; returns what is released by it, and the stop string if one is complete now.

        What follows a stop string is nobody's: a scanner that found one has done its work.
        """
        if not text:
            return "", None
        num_before = len(self._held)
        text = self._held + text
        # (end, start, string) of each; an earlier end is the earlier stop, and then an earlier start the longer one.
        found = min(
            (
                (start + len(s), start, s)
                for s in self._strings
                if (start := text.find(s, max(0, num_before - len(s) + 1))) >= 0
            ),
            default=None,
        )
        if found is not None:
            end, start, string = found
            return text[: end if self._include else start], string
        return self._release(text), None

    def skip(self, text: str) -> str:
        """Take more text, in which no stop string counts unless it ends behind it; returns what is released by it."""
        return self._release(self._held + text)

    def flush(self) -> str:
        """The text that was held back, now that no more follows."""
        held, self._held = self._held, ""
        return held

    def _release(self, text: str) -> str:
        num_held = max(_beginning_at_end(text, s) for s in self._strings)
        released = text[: len(text) - num_held]
        self._held = text[len(released) :]
        return released


def _beginning_at_end(text: str, string: str) -> int:
    """Length of the longest beginning of `string`, short of all of it, that `text` ends with."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0 and not string.startswith(text[start:]):
        start = text.find(string[0], start + 1)
    return len(text) - start if start >= 0 else 0
