"""Pages and who has them: the free list, the prefix cache, and the rows.

Every page is in exactly one place at any time: free, in the prefix cache (evictable or locked), or a row's own. A
row's pages are first those of the cached prefix it locks, then its own. Called by prefill, decode and the scheduler.
"""

from __future__ import annotations

import numpy as np

from minisgl_batch.batch import IntArray
from minisgl_batch.kvcache.base import PrefixCache, PrefixHandle
from minisgl_batch.request import Req
from minisgl_batch.scheduler.table import TableManager


class CacheManager:
    """Allocates pages, evicting cached prefixes when none is free, and keeps rows and cache in step."""

    def __init__(self, num_pages: int, prefix_cache: PrefixCache, table: TableManager) -> None:
        self.num_pages = num_pages
        self.page_size = prefix_cache.page_size
        self._cache = prefix_cache
        self._table = table
        self.reset()

    def reset(self) -> None:
        """Forget all cached prefixes; every page is free. No row may run."""
        self._cache.reset()
        self._stack: IntArray = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)  # its end is the top
        self._freed: list[IntArray] = []  # given back since the last allocation; joined once
        self._num_free = self.num_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that `allocate` can give: free ones and evictable ones."""
        return self._num_free + self._cache.num_evictable_pages

    def match(self, req: Req) -> tuple[PrefixHandle, IntArray]:
        """The cached prefix of a waiting request and its pages; its last token is always computed.

        A request that scores its prompt needs all of it computed.
        """
        return self._cache.match(req.ids[: req.num_cacheable])

    def lock(self, prefix: PrefixHandle) -> None:
        self._cache.lock(prefix)

    def unlock(self, prefix: PrefixHandle) -> None:
        self._cache.unlock(prefix)

    def allocate(self, num_pages: int) -> IntArray:
        """Take pages; the caller has checked `num_available_pages`."""
        if num_pages > self._num_free:
            self.free(self._cache.evict(num_pages - self._num_free))
        if self._freed:
            self._stack = np.concatenate([self._stack, *self._freed])
            self._freed = []
        assert num_pages <= len(self._stack), "allocated more pages than are available"
        split = len(self._stack) - num_pages
        taken: IntArray = self._stack[split:][::-1].copy()
        self._stack = self._stack[:split]
        self._num_free = split
        return taken

    def free(self, pages: IntArray) -> None:
        if len(pages):
            self._freed.append(pages)
            self._num_free += len(pages)

    def cache_row(self, req: Req) -> None:
        """Put what is computed of a running row into the prefix cache, in whole pages.

        Where another row was first, the row goes over to the cache's pages before its own duplicates are freed.
        """
        assert req.prefix is not None
        if req.is_alone:
            return
        table, slot = self._table, req.slot
        num_pages = int(table.cached_len[slot]) // self.page_size
        num_shared = req.prefix.num_tokens // self.page_size
        if num_pages <= num_shared:
            return
        own = table.page_table[slot, num_shared:num_pages].copy()
        ids = table.tokens[slot, req.prefix.num_tokens : num_pages * self.page_size]
        prefix, cached = self._cache.insert(req.prefix, ids, own)
        if not prefix.num_tokens:
            return  # a cache that keeps nothing
        duplicates = own != cached
        if duplicates.any():
            table.set_pages(slot, num_shared, cached)
            self.free(own[duplicates])
            req.num_reused = (num_shared + 1 + int(duplicates.nonzero()[0][-1])) * self.page_size
        self._cache.lock(prefix)
        self._cache.unlock(req.prefix)
        req.prefix = prefix

    def spoil_row(self, req: Req) -> None:
        """Let no other prompt find what was computed of this row, which holds numbers that overflowed.

        They aren't in its own tokens alone: in attention, tokens before them are in tiles with them.
        """
        self.cache_row(req)  # all of it: no later step is launched
        assert req.prefix is not None
        self._cache.spoil(req.prefix, req.num_reused)

    def release_row(self, req: Req) -> None:
        """Take all pages of a row that no step in flight names: the computed ones stay cached, the rest is free.

        A row that goes in the midst of its prompt never showed by a token whether its numbers are any.
        """
        if self._table.cached_len[req.slot] < self._table.prompt_end[req.slot]:
            self.spoil_row(req)
        else:
            self.cache_row(req)
        assert req.prefix is not None
        num_shared = req.prefix.num_tokens // self.page_size
        self.free(self._table.page_table[req.slot, num_shared : self._table.num_row_pages(req.slot)].copy())
        self._cache.unlock(req.prefix)
        req.prefix = None

    def check_integrity(self) -> list[str]:
        """What is wrong with the books while no row runs; empty when sound."""
        problems = self._cache.check_integrity()
        if self._cache.num_locked_pages:
            problems.append(f"{self._cache.num_locked_pages} pages are locked though no row runs")
        if self.num_available_pages != self.num_pages:
            problems.append(f"{self.num_available_pages} of {self.num_pages} pages are available though no row runs")
        return problems

    def page_counts(self) -> dict[str, int]:
        """Pages by place; they and the rows' own pages sum to `num_pages`."""
        return {
            "free": self._num_free,
            "evictable": self._cache.num_evictable_pages,
            "locked": self._cache.num_locked_pages,
        }

    def free_pages(self) -> IntArray:
        return np.concatenate([self._stack, *self._freed])
