"""The radix cache against a plain model: a set of cached page prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_batch.kvcache.base import PrefixHandle
from minisgl_batch.kvcache.radix import RadixCache


def ids_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class Model:
    """Every cached page by the tokens up to its end; locked prefixes by name."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(page_size)
        self.free = list(range(num_pages))
        self.pages: dict[bytes, int] = {}
        self.locks: list[tuple[PrefixHandle, bytes]] = []
        self.num_spoilt = 0

    def prefixes(self, ids: np.ndarray) -> list[bytes]:
        return [ids[:end].tobytes() for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def match(self, ids: np.ndarray) -> PrefixHandle:
        handle, pages = self.cache.match(ids)
        want = []
        for prefix in self.prefixes(ids):
            if prefix not in self.pages:
                break
            want.append(self.pages[prefix])
        assert pages.tolist() == want
        assert handle.num_tokens == len(want) * self.page_size
        return handle

    def insert(self, ids: np.ndarray) -> None:
        ids = ids[: len(ids) // self.page_size * self.page_size]
        prefixes = self.prefixes(ids)
        if len(prefixes) > len(self.free):
            return
        start, known = self.cache.match(ids[: len(ids) // 2])
        given = [self.free.pop() for _ in prefixes[len(known) :]]
        handle, pages = self.cache.insert(start, ids[start.num_tokens :], np.array(given, dtype=np.int32))
        assert handle.num_tokens == len(ids)
        for prefix, mine, cached in zip(prefixes[len(known) :], given, pages.tolist(), strict=True):
            assert cached == self.pages.setdefault(prefix, mine)
            if cached != mine:
                self.free.append(mine)

    def spoil(self, ids: np.ndarray, num_good: int) -> None:
        """The edge that goes beyond `num_good` gets names of its own."""
        handle, _ = self.cache.match(ids)
        ends = [0, *(end for _, end in self.cache.path(handle))]
        self.cache.spoil(handle, num_good)
        if num_good >= handle.num_tokens:
            return
        first = max(i for i, end in enumerate(ends) if end <= num_good)
        start, end = ends[first], ends[first + 1]
        self.num_spoilt += 1
        lost, name = ids[: start + self.page_size].tobytes(), ids_of(*[-self.num_spoilt] * (end - start)).tobytes()

        def renamed(prefix: bytes) -> bytes:
            new = prefix[: 4 * start] + name + prefix[4 * end :]
            return new[: len(prefix)] if prefix.startswith(lost) else prefix

        self.pages = {renamed(prefix): page for prefix, page in self.pages.items()}
        self.locks = [(handle, renamed(prefix)) for handle, prefix in self.locks]

    def evict(self, num_pages: int) -> None:
        locked = {prefix[:end] for _, prefix in self.locks for end in range(0, len(prefix) + 1, 4 * self.page_size)}
        evictable = [prefix for prefix in self.pages if prefix not in locked]
        assert self.cache.num_evictable_pages == len(evictable)
        evicted = self.cache.evict(num_pages).tolist()
        assert len(evicted) == min(num_pages, len(evictable))
        by_page = {page: prefix for prefix, page in self.pages.items()}
        for page in evicted:
            prefix = by_page[page]
            assert prefix not in locked
            del self.pages[prefix]
            self.free.append(page)
        # No page may stay whose predecessor is gone.
        for prefix in self.pages:
            parent = prefix[: -4 * self.page_size]
            assert not parent or parent in self.pages


sequences = st.lists(st.integers(0, 1), min_size=0, max_size=20).map(lambda v: ids_of(*v))
operations = st.one_of(
    st.tuples(st.just("match"), sequences),
    st.tuples(st.just("insert"), sequences),
    st.tuples(st.just("lock"), sequences),
    st.tuples(st.just("unlock"), st.integers(0, 5)),
    st.tuples(st.just("evict"), st.integers(0, 6)),
    st.tuples(st.just("spoil"), st.tuples(sequences, st.integers(0, 20))),
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([1, 2, 3]), st.lists(operations, max_size=40))
def test_cache_agrees_with_a_plain_set_of_prefixes(page_size: int, story: list[tuple[str, object]]) -> None:
    model = Model(page_size, num_pages=60)
    for kind, value in story:
        if kind == "match":
            model.match(value)  # type: ignore[arg-type]
        elif kind == "insert":
            model.insert(value)  # type: ignore[arg-type]
        elif kind == "lock":
            handle = model.match(value)  # type: ignore[arg-type]
            model.cache.lock(handle)
            model.locks.append((handle, value[: handle.num_tokens].tobytes()))  # type: ignore[index]
        elif kind == "unlock" and model.locks:
            handle, _ = model.locks.pop(value % len(model.locks))  # type: ignore[operator]
            model.cache.unlock(handle)
        elif kind == "spoil":
            model.spoil(*value)  # type: ignore[misc]
        elif kind == "evict":
            model.evict(value)  # type: ignore[arg-type]
        assert model.cache.check_integrity() == []
        assert sorted(model.cache.pages().tolist()) == sorted(model.pages.values())


def test_least_recently_used_prefix_goes_first() -> None:
    cache = RadixCache(page_size=2)
    for page, ids in enumerate([ids_of(1, 1), ids_of(2, 2), ids_of(3, 3)]):
        cache.insert(cache.match(ids_of())[0], ids, ids_of(page))
    handle, _ = cache.match(ids_of(1, 1))
    cache.lock(handle)
    cache.unlock(handle)
    assert [cache.evict(1).tolist() for _ in range(4)] == [[1], [2], [0], []]


def test_split_hands_the_lock_to_the_upper_part() -> None:
    cache = RadixCache(page_size=1)
    handle, _ = cache.insert(cache.match(ids_of())[0], ids_of(1, 2, 3, 4), ids_of(0, 1, 2, 3))
    cache.lock(handle)
    cache.match(ids_of(1, 2, 9))
    assert cache.num_locked_pages == 4
    assert cache.evict(4).tolist() == []
    cache.unlock(handle)
    assert cache.num_evictable_pages == 4
    assert sorted(cache.evict(9).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_ids", [0, 1, 3])
def test_prefix_shorter_than_a_page_is_never_cached(num_ids: int) -> None:
    cache = RadixCache(page_size=4)
    handle, pages = cache.match(ids_of(*range(num_ids)))
    assert (handle.num_tokens, pages.tolist()) == (0, [])
