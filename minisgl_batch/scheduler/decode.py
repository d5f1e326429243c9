"""Rows that decode: which run in the next step, and who gives way when pages run dry.

Rows are admitted on an estimate of their final length instead of `max_tokens`, which most rows never reach. The
estimate is the share of their `max_tokens` that finished rows used, smoothed. When it was too low and the pool runs
dry, the row with the least output is retracted: its pages go, its tokens stay, and it prefills again later. The oldest
row is never retracted and any row fits alone, so something always moves on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_batch.batch import IntArray, SharedPrefixes
from minisgl_batch.request import Req
from minisgl_batch.scheduler.cache import CacheManager
from minisgl_batch.scheduler.sharing import PrefixSharing
from minisgl_batch.scheduler.table import TableManager


class LengthEstimate:
    """The share of `max_tokens` that a row is expected to use. Moves with finished rows only, never with time."""

    INITIAL = 0.3
    SMOOTHING = 1 / 32

    def __init__(self) -> None:
        self.ratio = self.INITIAL

    def finished(self, num_output: int, max_output: int) -> None:
        if max_output > 1:  # rows that could make one token, such as choices, say nothing about others
            self.ratio += self.SMOOTHING * (num_output / max_output - self.ratio)

    def retracted(self) -> None:
        self.ratio = min(1.0, 1.5 * self.ratio + 0.02)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows of a step, in the step's order; the fields are those of ScheduledBatch."""

    slots: IntArray
    new_pages: IntArray
    shared: SharedPrefixes | None


NO_ROWS = DecodeRows(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), None)


class DecodeManager:
    """See the module's docstring."""

    def __init__(self, table: TableManager, cache: CacheManager, sharing: PrefixSharing) -> None:
        self._table = table
        self._cache = cache
        self._sharing = sharing
        self.estimate = LengthEstimate()

    def ready(self) -> IntArray:
        """Slots, ascending, of the rows that can decode: prompt computed and not at their last token."""
        table = self._table
        ready = table.running & (table.cached_len >= table.prompt_end) & (table.device_len < table.max_len)
        return np.flatnonzero(ready).astype(np.int32)

    def schedule(self) -> DecodeRows | None:
        """The next step's decode rows, each with room for its token; None when there are too few pages."""
        slots = self.ready()
        if not len(slots):
            return NO_ROWS
        slots, shared = self._sharing.arrange(slots)
        begins_page = self._table.cached_len[slots] % self._table.page_size == 0
        num_pages = int(begins_page.sum())
        if num_pages > self._cache.num_available_pages:
            return None
        new_pages = np.full(len(slots), -1, dtype=np.int32)
        if num_pages:
            new_pages[begins_page] = self._cache.allocate(num_pages)
            self._table.append_pages(slots[begins_page], new_pages[begins_page])
        return DecodeRows(slots, new_pages, shared)

    def victim(self) -> Req:
        """The row to retract: the one with the least output, the youngest of these; never the oldest row."""
        reqs = [req for req in self._table.reqs if req is not None]
        reqs.remove(min(reqs, key=lambda req: req.arrival))
        num_output = self._table.device_len - self._table.num_prompt
        return min(reqs, key=lambda req: (num_output[req.slot], -req.arrival))

    def expected_growth(self) -> int:
        """Pages that all rows with a slot are expected to take beyond what they have."""
        table = self._table
        used = np.flatnonzero(table.running)
        length = np.maximum(table.cached_len[used], table.prompt_end[used])
        return self._growth(length, table.num_prompt[used], table.max_len[used])

    def expected_growth_of(self, req: Req) -> int:
        """The same of a waiting request, once it is admitted."""
        return self._growth(*np.array([[len(req.ids)], [req.num_prompt], [req.max_len]], dtype=np.int32))

    def _growth(self, length: IntArray, num_prompt: IntArray, max_len: IntArray) -> int:
        """Pages that rows are expected to take in all, beyond those of their first `length` tokens."""
        expected = num_prompt + np.ceil(self.estimate.ratio * (max_len - num_prompt)).astype(np.int32)
        # A row that outlived the estimate, like any other, may need its next page at once.
        expected = np.minimum(max_len, np.maximum(expected, length + 1))
        size = self._table.page_size
        return int((-(-expected // size) - -(-length // size)).sum())
