"""What a prefix cache is: a map from token prefixes to the KV pages that hold them, at page granularity.

It owns the pages it was given until it evicts them. It knows nothing of requests; `scheduler.cache` drives it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_batch.batch import IntArray

EMPTY_PAGES: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A cached prefix: `num_tokens` tokens (whole pages) ending at `node`. Valid while locked."""

    node: Any
    num_tokens: int


class PrefixCache(ABC):
    """Longest-prefix look-up over pages, with locks that keep a prefix from being evicted."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    @property
    @abstractmethod
    def num_evictable_pages(self) -> int:
        """Pages that `evict` could give back now."""

    @property
    @abstractmethod
    def num_locked_pages(self) -> int:
        """Pages of the cache that some lock protects."""

    @abstractmethod
    def match(self, ids: IntArray) -> tuple[PrefixHandle, IntArray]:
        """The longest cached prefix of `ids` in whole pages, and its pages."""

    @abstractmethod
    def insert(self, prefix: PrefixHandle, ids: IntArray, pages: IntArray) -> tuple[PrefixHandle, IntArray]:
        """Cache what follows a prefix: `ids` (a whole number of pages) in `pages`, one page per `page_size` ids.

        Where the cache has a part of `ids` already, its own pages stay and the given ones remain the caller's.

        Returns:
            The handle of the prefix with `ids`, and the pages that `ids` have now. `pages[i]` belongs to the cache from
            here on exactly where it equals the returned page i.
        """

    @abstractmethod
    def spoil(self, handle: PrefixHandle, num_good: int) -> None:
        """Let no match find more than about the first `num_good` tokens of a prefix any more, or what goes on from it.

        Locks hold, and the pages are the cache's until they are evicted.
        """

    @abstractmethod
    def lock(self, handle: PrefixHandle) -> None:
        """Keep the prefix from eviction until `unlock`; locks count."""

    @abstractmethod
    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`."""

    @abstractmethod
    def evict(self, num_pages: int) -> IntArray:
        """Give back `num_pages` pages, or all that can be evicted where those are fewer; least recently used first."""

    @abstractmethod
    def path(self, handle: PrefixHandle) -> list[tuple[int, int]]:
        """The nodes from the root's child to the prefix's end: what each is known by, and the tokens up to its end."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, locks included; the caller takes all pages back."""

    @abstractmethod
    def check_integrity(self) -> list[str]:
        """What is wrong with the structure, in words; empty when sound."""
