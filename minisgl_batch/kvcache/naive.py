"""The cache that never reuses anything: the switch that shows what prefix reuse is worth."""

from __future__ import annotations

from minisgl_batch.batch import IntArray
from minisgl_batch.kvcache.base import EMPTY_PAGES, PrefixCache, PrefixHandle

_NOTHING = PrefixHandle(node=None, num_tokens=0)


class NaiveCache(PrefixCache):
    """Holds no pages: every match is empty, and inserted pages stay the caller's."""

    @property
    def num_evictable_pages(self) -> int:
        return 0

    @property
    def num_locked_pages(self) -> int:
        return 0

    def match(self, ids: IntArray) -> tuple[PrefixHandle, IntArray]:
        return _NOTHING, EMPTY_PAGES

    def insert(self, prefix: PrefixHandle, ids: IntArray, pages: IntArray) -> tuple[PrefixHandle, IntArray]:
        return _NOTHING, EMPTY_PAGES

    def spoil(self, handle: PrefixHandle, num_good: int) -> None:
        pass

    def lock(self, handle: PrefixHandle) -> None:
        pass

    def unlock(self, handle: PrefixHandle) -> None:
        pass

    def evict(self, num_pages: int) -> IntArray:
        return EMPTY_PAGES

    def path(self, handle: PrefixHandle) -> list[tuple[int, int]]:
        return []

    def reset(self) -> None:
        pass

    def check_integrity(self) -> list[str]:
        return []
