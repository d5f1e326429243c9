"""Which decode rows attend to a common prefix in two levels: the prefix once for all of them, then each its own rest.

Candidates are the nodes of the prefix cache that several rows lock. Of all ways to give each row at most one of them,
the one that saves most reads is chosen, and it is used only where an estimate says that it is faster. Groups change
only when rows come or go. Called by `decode` for each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl_batch.batch import IntArray, SharedPrefixes, SharingCosts
from minisgl_batch.kvcache.base import PrefixCache
from minisgl_batch.scheduler.table import TableManager


@dataclass(slots=True)
class _Group:
    """The rows that lock a node of the prefix cache, and the tokens of its prefix."""

    num_tokens: int
    slots: list[int] = field(default_factory=list)
    below: list[_Group] = field(default_factory=list)

    @property
    def saved_tokens(self) -> int:
        return (len(self.slots) - 1) * self.num_tokens

    def best_cut(self) -> list[_Group]:
        """This group, or groups of its parts: whichever saves more reads."""
        parts = [group for below in self.below for group in below.best_cut()]
        return parts if sum(group.saved_tokens for group in parts) > self.saved_tokens else [self]


class PrefixSharing:
    """Groups of the rows that decode now."""

    def __init__(self, table: TableManager, cache: PrefixCache, costs: SharingCosts | None) -> None:
        self._table = table
        self._cache = cache
        self._costs = costs
        self._members = b""
        self._ordered: IntArray = np.empty(0, dtype=np.int32)
        self._shared: SharedPrefixes | None = None
        self._version = 0

    def arrange(self, slots: IntArray) -> tuple[IntArray, SharedPrefixes | None]:
        """The rows in the order in which they shall run, group by group, and their groups if they have any.

        Within a group, and behind the last one, long rows go first: a kernel that met them last would wait for them
        alone. All rows grow alike, so an order stays right until rows come or go.
        """
        if self._costs is None:
            return slots, None
        members = slots.tobytes() + self._table.generation[slots].tobytes()
        if members != self._members:
            self._members = members
            groups = self._find_groups(slots.tolist(), self._costs) if len(slots) >= self._costs.min_rows else []
            self._arrange(slots, groups)
        return self._ordered, self._shared

    def _arrange(self, slots: IntArray, groups: list[_Group]) -> None:
        rank = np.full(self._table.max_running + 1, len(groups), dtype=np.int32)
        for number, group in enumerate(groups):
            rank[group.slots] = number
        self._ordered = slots[np.lexsort((slots, -self._table.cached_len[slots], rank[slots]))]
        self._shared = None
        if groups:
            size, page_table = self._table.page_size, self._table.page_table
            self._version += 1
            self._shared = SharedPrefixes(
                num_rows=np.array([len(group.slots) for group in groups], dtype=np.int32),
                num_pages=np.array([group.num_tokens // size for group in groups], dtype=np.int32),
                pages=np.concatenate([page_table[group.slots[0], : group.num_tokens // size] for group in groups]),
                version=self._version,
            )

    def _find_groups(self, slots: list[int], costs: SharingCosts) -> list[_Group]:
        """The groups to use, none where they would not pay."""
        groups: dict[int, _Group] = {}  # by node
        roots: list[_Group] = []
        for slot in slots:
            siblings = roots
            for node, num_tokens in self._path(slot):
                group = groups.get(node)
                if group is None:
                    group = groups[node] = _Group(num_tokens)
                    siblings.append(group)
                group.slots.append(slot)
                siblings = group.below
        cut = [group for root in roots for group in root.best_cut() if len(group.slots) > 1]
        best = sorted(cut, key=lambda group: (-group.saved_tokens, group.slots[0]))[: costs.max_groups]
        saved = sum(group.saved_tokens for group in best)
        longest = max((group.num_tokens for group in best), default=0)
        return best if costs.is_worth(len(slots), saved, longest) else []

    def _path(self, slot: int) -> list[tuple[int, int]]:
        """The nodes of the row's prefix that other rows lock, too."""
        req = self._table.reqs[slot]
        assert req is not None
        assert req.prefix is not None
        return self._cache.path(req.prefix, min_locks=2)
