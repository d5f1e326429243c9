"""What a reader has of each row: turns messages and results, in any order and repeated, into events that are neither.

Knows nothing of Redis. Called by `reader.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from minisgl_batch.reasoning import Reasoning
from minisgl_jobs.model import RowError, RowResult
from minisgl_jobs.streams import RowDelta


class RowStarted(msgspec.Struct, frozen=True):
    """A sample begins, or begins anew: forget the text that it had."""

    row_index: int
    sample_index: int


class RowText(msgspec.Struct, frozen=True):
    """More text of a sample; `offset` characters came before.

    Where the text is split, no event has the marks around the reasoning, which `offset` counts.
    """

    row_index: int
    sample_index: int
    offset: int
    text: str
    is_reasoning: bool = False


class RowFinished(msgspec.Struct, frozen=True):
    """A sample has all of its text. Comes once."""

    row_index: int
    sample_index: int
    status: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    error: RowError | None
    custom_id: str = ""


RowEvent: TypeAlias = RowStarted | RowText | RowFinished


@dataclass
class _Running:
    attempt: int
    pieces: list[str] = field(default_factory=list)
    num_chars: int = 0


class RowTexts:
    """The reader's view of all rows: bits for those that have ended, texts only of those that run."""

    def __init__(self, num_rows: int, rows: Collection[int] | None = None) -> None:
        self._num_rows = num_rows
        self._wanted = None if rows is None else sorted({row for row in rows if 0 <= row < num_rows})
        self._wanted_set = None if rows is None else frozenset(rows)
        self._running: dict[tuple[int, int], _Running] = {}
        self._finished: dict[int, bytearray] = {}  # sample index -> a bit for each row
        self._complete = bytearray(-(-num_rows // 8))  # rows all of whose samples have ended, for certain
        self._num_samples: dict[int, int] = {}  # of rows of which some samples have ended, as far as messages said it

    def apply(self, delta: RowDelta) -> list[RowEvent] | None:
        """The events that a message adds; None when text before it is missing."""
        row, sample = delta.row_index, delta.sample_index
        if not self._is_wanted(row) or self._is_finished(row, sample):
            return []
        running = self._running.get((row, sample))
        if running is not None and delta.attempt < running.attempt:
            return []  # of a worker that has lost the chunk
        events: list[RowEvent] = []
        if running is None or delta.attempt > running.attempt:
            if delta.offset > 0:
                return None
            running = self._running[row, sample] = _Running(delta.attempt)
            events.append(RowStarted(row, sample))
        if delta.offset > running.num_chars:
            return None
        events += self._extend(row, sample, running, delta.text[running.num_chars - delta.offset :], delta.reasoning)
        end = delta.end
        if end is not None:
            if running.num_chars != end.num_chars:
                return None
            self._set_finished(row, sample, end.num_samples)
            counts = (end.prompt_tokens, end.completion_tokens)
            events.append(RowFinished(row, sample, end.status, end.finish_reason, *counts, end.error, end.custom_id))
        return events

    def finish(self, result: RowResult) -> Iterator[RowEvent]:
        """The events that a finished result adds."""
        row, sample = result.row_index, result.sample_index
        if not self._is_wanted(row) or self._is_finished(row, sample):
            return
        running = self._running.get((row, sample))
        if running is None or not result.whole_text.startswith("".join(running.pieces)):
            # Not seen yet, or generated anew while this reader missed it.
            running = self._running[row, sample] = _Running(0)
            yield RowStarted(row, sample)
        yield from self._extend(row, sample, running, result.whole_text[running.num_chars :], result.reasoning)
        self._set_finished(row, sample, None)
        counts, name = (result.prompt_tokens, result.completion_tokens), result.custom_id or ""
        yield RowFinished(row, sample, result.status, result.finish_reason, *counts, result.error, name)

    def missing(self, *, strict: bool = False) -> list[range]:
        """Rows to look for among the finished ones, as ascending ranges.

        Args:
            strict: also those of which only the first sample is known to have ended. How many a row has is known from
                messages alone.
        """
        bits = self._complete if strict else self._finished.get(0, bytes(len(self._complete)))
        rows = range(self._num_rows) if self._wanted is None else self._wanted
        ranges: list[range] = []
        for row in rows:
            if bits[row >> 3] >> (row & 7) & 1:
                continue
            if ranges and ranges[-1].stop == row:
                ranges[-1] = range(ranges[-1].start, row + 1)
            else:
                ranges.append(range(row, row + 1))
        return ranges

    def _extend(
        self, row: int, sample: int, running: _Running, text: str, reasoning: Reasoning | None
    ) -> Iterator[RowEvent]:
        if text:
            offset = running.num_chars
            if reasoning is None:
                yield RowText(row, sample, offset, text)
            else:
                inside, answer = reasoning.split(text, offset)
                if inside:
                    yield RowText(row, sample, max(offset, reasoning.start), inside, True)
                if answer:
                    yield RowText(row, sample, max(offset, reasoning.answer), answer)
            running.pieces.append(text)
            running.num_chars += len(text)

    def _is_wanted(self, row: int) -> bool:
        return 0 <= row < self._num_rows and (self._wanted_set is None or row in self._wanted_set)

    def _is_finished(self, row: int, sample: int) -> bool:
        bits = self._finished.get(sample)
        return bits is not None and bool(bits[row >> 3] >> (row & 7) & 1)

    def _set_finished(self, row: int, sample: int, num_samples: int | None) -> None:
        self._running.pop((row, sample), None)
        bits = self._finished.setdefault(sample, bytearray(len(self._complete)))
        bits[row >> 3] |= 1 << (row & 7)
        num_samples = num_samples or self._num_samples.get(row)
        if num_samples is None:
            return
        if all(self._is_finished(row, other) for other in range(num_samples)):
            self._complete[row >> 3] |= 1 << (row & 7)
            self._num_samples.pop(row, None)
        else:
            self._num_samples[row] = num_samples
