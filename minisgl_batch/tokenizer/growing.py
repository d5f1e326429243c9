"""The text of one request as its tokens come: detokenized, told from reasoning, and searched for stop strings.

Called by `OutputProcessor` for requests with stop strings or a reader; other texts are made at their end.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_batch.reasoning import Reasoning
from minisgl_batch.tokenizer.detokenizer import TextStream
from minisgl_batch.tokenizer.input import ReasoningRules, StopRules
from minisgl_batch.tokenizer.stop import StopScanner


class GrowingText:
    """See the module's docstring.

    Attributes:
        num_chars: of the text so far.
    """

    __slots__ = (
        "_min_tokens",
        "_num_tokens",
        "_pieces",
        "_scanner",
        "_searches_all",
        "_splitter",
        "_stream",
        "num_chars",
    )

    def __init__(self, stream: TextStream, stops: StopRules, reasoning: ReasoningRules | None) -> None:
        self._stream = stream
        self._min_tokens = stops.min_tokens
        self._scanner = StopScanner(stops.strings, include=stops.include_in_output) if stops.strings else None
        self._splitter = None if reasoning is None else reasoning.splitter()
        self._searches_all = reasoning is not None and reasoning.stops
        self._pieces: list[str] = []
        self._num_tokens = 0
        self.num_chars = 0

    @property
    def reasoning(self) -> Reasoning | None:
        """Where its parts are, if it is to be split."""
        return None if self._splitter is None else self._splitter.found

    def grow(self, token_ids: Sequence[int], num_text_tokens: int, *, is_last: bool) -> tuple[str, str | None]:
        """Take the tokens up to `num_text_tokens`; returns the text that this releases, and a stop string if found."""
        unsearched = self._push(token_ids, min(self._min_tokens, num_text_tokens))
        text = self._push(token_ids, num_text_tokens)
        if is_last:
            text += self._stream.flush()
        released = self._take(unsearched, search=False, is_last=False)[0] if unsearched else ""
        more, stop_string = self._take(text, search=True, is_last=is_last)
        released += more
        if released:
            self._pieces.append(released)
            self.num_chars += len(released)
        return released, stop_string

    def so_far(self) -> str:
        """All that was released."""
        return "".join(self._pieces)

    def _push(self, token_ids: Sequence[int], end: int) -> str:
        """The text of the next tokens, up to `end`."""
        new = token_ids[self._num_tokens : end]
        self._num_tokens += len(new)
        return "".join(map(self._stream.push, new))

    def _take(self, text: str, *, search: bool, is_last: bool) -> tuple[str, str | None]:
        splitter = self._splitter
        if splitter is None:
            return self._scan(text, search=search, is_last=is_last)
        if self._searches_all:
            text, stop_string = self._scan(text, search=search, is_last=is_last)
            released = splitter.push(text)
            return released + (splitter.flush() if is_last or stop_string is not None else ""), stop_string
        offset = splitter.num_released
        released = splitter.push(text) + (splitter.flush() if is_last else "")
        begin = min(len(released), max(0, splitter.found.answer - offset))
        answer, stop_string = self._scan(released[begin:], search=search, is_last=is_last)
        return released[:begin] + answer, stop_string

    def _scan(self, text: str, *, search: bool, is_last: bool) -> tuple[str, str | None]:
        if self._scanner is None:
            return text, None
        if not search:
            return self._scanner.skip(text), None
        text, stop_string = self._scanner.push(text)
        if is_last and stop_string is None:
            text += self._scanner.flush()
        return text, stop_string
