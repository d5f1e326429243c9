"""Radix tree over token prefixes at page granularity (RadixAttention; Zheng et al. 2023, SGLang).

An edge holds a run of whole pages; children are found by the bytes of their first page. Locks count from a node up to
the root, so a locked node's ancestors are locked too, and every evictable node's subtree is evictable. Leaves without
a lock wait in a heap by last use: evicting a page costs O(log n), not a walk of the tree. "When" is a logical tick
that advances with each unlock or insert, so that ranks which make the same calls evict the same pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from minisgl_batch.batch import IntArray
from minisgl_batch.kvcache.base import EMPTY_PAGES, PrefixCache, PrefixHandle
from minisgl_kernels.common_prefix import common_prefix_len


class RadixNode:
    """A run of pages below its parent. `key` has page_size ids per entry of `pages`; the root's are empty."""

    __slots__ = ("children", "key", "last_used", "lock_count", "pages", "parent")

    def __init__(self, key: IntArray, pages: IntArray, parent: RadixNode | None) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.lock_count = 0
        self.last_used = 0

    @property
    def is_evictable_leaf(self) -> bool:
        return self.lock_count == 0 and not self.children and self.parent is not None


class RadixCache(PrefixCache):
    """See the module's docstring; the interface is PrefixCache's."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.reset()

    def reset(self) -> None:
        self._root = RadixNode(EMPTY_PAGES, EMPTY_PAGES, None)
        self._tick = 0
        # (last_used, push number, node); an entry is stale when the node was used, locked, extended or evicted since
        self._lru: list[tuple[int, int, RadixNode]] = []
        self._num_pushes = 0
        self._num_pages = 0
        self._num_locked_pages = 0
        self._num_spoilt = 0

    @property
    def num_evictable_pages(self) -> int:
        return self._num_pages - self._num_locked_pages

    @property
    def num_locked_pages(self) -> int:
        return self._num_locked_pages

    def match(self, ids: IntArray) -> tuple[PrefixHandle, IntArray]:
        node, num_tokens, pages = self._walk(self._root, ids)
        return PrefixHandle(node, num_tokens), _concat(pages)

    def insert(self, prefix: PrefixHandle, ids: IntArray, pages: IntArray) -> tuple[PrefixHandle, IntArray]:
        node, num_tokens, held = self._walk(prefix.node, ids)
        if num_tokens < len(ids):
            first = num_tokens // self.page_size
            node = self._add_child(node, ids[num_tokens:].copy(), pages[first:].copy())
            held.append(node.pages)
        self._touch(node)
        return PrefixHandle(node, prefix.num_tokens + len(ids)), _concat(held)

    def spoil(self, handle: PrefixHandle, num_good: int) -> None:
        topmost, start = None, handle.num_tokens
        for node in self._path(handle.node):
            if start <= num_good:
                break
            topmost, start = node, start - len(node.key)
        if topmost is None:
            return
        assert topmost.parent is not None
        siblings = topmost.parent.children
        del siblings[self._page_key(topmost.key)]
        self._num_spoilt += 1
        topmost.key = np.full_like(topmost.key, -self._num_spoilt)  # no text's tokens
        siblings[self._page_key(topmost.key)] = topmost

    def lock(self, handle: PrefixHandle) -> None:
        for node in self._path(handle.node):
            if node.lock_count == 0:
                self._num_locked_pages += len(node.pages)
            node.lock_count += 1

    def unlock(self, handle: PrefixHandle) -> None:
        self._tick += 1
        for node in self._path(handle.node):
            node.lock_count -= 1
            node.last_used = self._tick
            if node.lock_count == 0:
                self._num_locked_pages -= len(node.pages)
                self._offer(node)

    def evict(self, num_pages: int) -> IntArray:
        evicted: list[IntArray] = []
        wanted = num_pages
        while wanted > 0 and self._lru:
            last_used, _, node = heapq.heappop(self._lru)
            if not node.is_evictable_leaf or node.last_used != last_used:
                continue
            taken = min(wanted, len(node.pages))
            evicted.append(self._trim(node, taken))
            wanted -= taken
        return _concat(evicted)

    def path(self, handle: PrefixHandle) -> list[tuple[int, int]]:
        nodes, num_tokens = [], handle.num_tokens
        for node in self._path(handle.node):
            nodes.append((id(node), num_tokens))
            num_tokens -= len(node.key)
        return nodes[::-1]

    # ------------------------------------------------------------- the tree

    def _walk(self, node: RadixNode, ids: IntArray) -> tuple[RadixNode, int, list[IntArray]]:
        """Follow `ids` down from a node in whole pages, splitting the last edge where it is left half-way."""
        position, pages = 0, []
        while len(ids) - position >= self.page_size:
            child = node.children.get(self._page_key(ids, position))
            if child is None:
                break
            common = common_prefix_len(child.key, ids[position:])
            common -= common % self.page_size
            if common < len(child.key):
                child = self._split(child, common)
            position += common
            pages.append(child.pages)
            node = child
        return node, position, pages

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut an edge after `at` ids and return the new upper node, which takes over the lock count."""
        assert node.parent is not None
        num_upper = at // self.page_size
        upper = RadixNode(node.key[:at], node.pages[:num_upper], node.parent)
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        node.parent.children[self._page_key(upper.key)] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[num_upper:], upper
        upper.children[self._page_key(node.key)] = node
        return upper

    def _add_child(self, parent: RadixNode, key: IntArray, pages: IntArray) -> RadixNode:
        child = RadixNode(key, pages, parent)
        parent.children[self._page_key(key)] = child
        self._num_pages += len(pages)
        return child

    def _trim(self, leaf: RadixNode, num_pages: int) -> IntArray:
        """Take the last pages of a leaf; an emptied leaf goes, and its parent may be the next to go."""
        assert leaf.parent is not None
        self._num_pages -= num_pages
        keep = len(leaf.pages) - num_pages
        taken = leaf.pages[keep:]
        if keep == 0:
            parent, leaf.parent = leaf.parent, None
            del parent.children[self._page_key(leaf.key)]
            self._offer(parent)
        else:
            leaf.key, leaf.pages = leaf.key[: keep * self.page_size], leaf.pages[:keep]
            self._offer(leaf)
        return taken

    def _touch(self, node: RadixNode) -> None:
        self._tick += 1
        node.last_used = self._tick
        self._offer(node)

    def _offer(self, node: RadixNode) -> None:
        """Enter a node for eviction if it is an unlocked leaf."""
        if not node.is_evictable_leaf:
            return
        self._num_pushes += 1
        heapq.heappush(self._lru, (node.last_used, self._num_pushes, node))
        if len(self._lru) > 64 + 4 * self._num_pages:
            self._lru = [entry for entry in self._lru if entry[2].is_evictable_leaf and entry[2].last_used == entry[0]]
            heapq.heapify(self._lru)

    def _page_key(self, ids: IntArray, position: int = 0) -> bytes:
        return ids[position : position + self.page_size].tobytes()

    def _path(self, node: RadixNode) -> Iterator[RadixNode]:
        """From `node` up to, without, the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    # -------------------------------------------------------------- checks

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root, parents first."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def pages(self) -> IntArray:
        """Every page the tree holds."""
        return _concat([node.pages for node in self.nodes()])

    def check_integrity(self) -> list[str]:
        problems: list[str] = []
        num_pages = num_locked = 0
        waiting = {id(node) for last_used, _, node in self._lru if node.last_used == last_used}
        for node in self.nodes():
            num_pages += len(node.pages)
            num_locked += len(node.pages) if node.lock_count else 0
            if len(node.key) != len(node.pages) * self.page_size or not len(node.pages):
                problems.append(f"a node has {len(node.key)} ids in {len(node.pages)} pages")
            if node.lock_count < max((child.lock_count for child in node.children.values()), default=0):
                problems.append("a child is locked more often than its parent")
            for key, child in node.children.items():
                if child.parent is not node or key != self._page_key(child.key):
                    problems.append("a child is filed under the wrong parent or page")
            if node.is_evictable_leaf and id(node) not in waiting:
                problems.append("an unlocked leaf can't be found for eviction")
        if num_pages != self._num_pages:
            problems.append(f"counts {self._num_pages} pages, holds {num_pages}")
        if num_locked != self._num_locked_pages:
            problems.append(f"counts {self._num_locked_pages} locked pages, holds {num_locked}")
        return problems


def _concat(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else EMPTY_PAGES
