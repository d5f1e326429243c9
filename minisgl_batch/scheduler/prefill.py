"""The waiting list: which requests get a slot now, and how much of their prompts one step computes.

One token budget per step bounds the step's length, and so how long an abort or a token of a running row waits. Prompts
larger than what is left of it are cut into pieces; at most one request is partly computed at a time, and it goes first
in the next step. Requests are admitted in order; only one that waits for a prefix is passed over.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from minisgl_batch.batch import IntArray
from minisgl_batch.kvcache.base import PrefixHandle
from minisgl_batch.request import Req, ReqState
from minisgl_batch.scheduler.cache import CacheManager
from minisgl_batch.scheduler.decode import DecodeManager
from minisgl_batch.scheduler.table import TableManager


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` more tokens of a running request's prompt."""

    req: Req
    num_tokens: int


MIN_STARTS = 8
STARTS_SHARE = 16  # of the running rows
MAX_WAIT_STEPS = 32

PageKey: TypeAlias = tuple[int, bytes]
"""A page below a node of the prefix cache: the node's id and the page's token ids."""


class PrefillManager:
    """See the module's docstring."""

    def __init__(self, table: TableManager, cache: CacheManager, decode: DecodeManager) -> None:
        self._table = table
        self._cache = cache
        self._decode = decode
        self._waiting: OrderedDict[int, Req] = OrderedDict()
        self._partial: Req | None = None
        self._last_step = -MAX_WAIT_STEPS  # the last one with pieces

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, req: Req) -> None:
        self._waiting[req.uid] = req

    def requeue(self, req: Req) -> None:
        """Put a retracted request back, first in line."""
        self._waiting[req.uid] = req
        self._waiting.move_to_end(req.uid, last=False)

    def drop(self, req: Req) -> None:
        """Forget a waiting or partly computed request."""
        self._waiting.pop(req.uid, None)
        if self._partial is req:
            self._partial = None

    def is_worthwhile(self, step: int) -> bool:
        """Whether a step of pieces should interrupt the decode rows.

        Finished rows free their slots one by one. Filling each at once would make a tiny step of each, while all other
        rows wait: so new rows wait until several can begin together, but never long.
        """
        num_running = self._table.num_used_slots
        num_startable = min(self._table.num_free_slots, len(self._waiting))
        if self._partial is not None or not num_running or not num_startable:
            return self._partial is not None or num_startable > 0
        enough = min(len(self._waiting), max(MIN_STARTS, num_running // STARTS_SHARE))
        return num_startable >= enough or step - self._last_step >= MAX_WAIT_STEPS

    def schedule(self, budget: int, step: int) -> list[Piece]:
        """Pieces for the next step, of at most `budget` tokens in all; admits requests, in order, while they fit."""
        self._last_step = step
        pieces: list[Piece] = []
        ahead: set[PageKey | None] = set()  # pages that this step computes: what other requests may wait for
        if self._partial is not None:
            budget = self._add_piece(self._partial, budget, pieces, ahead)
        growth: int | None = None  # pages that rows with a slot will still take
        for req in self._waiting.values():
            if not budget or not self._table.num_free_slots:
                break
            prefix, pages = self._cache.match(req)
            page = self._next_page(req, prefix, req.num_cacheable)
            if page is not None and page in ahead:
                continue  # its prefix is being computed in this very step: in the next one it is in the cache
            if growth is None:
                growth = self._decode.expected_growth()
            growth += self._decode.expected_growth_of(req)
            if not self._admit(req, prefix, pages, growth):
                break
            budget = self._add_piece(req, budget, pieces, ahead)
        for piece in pieces:
            self._waiting.pop(piece.req.uid, None)
        return pieces

    def _add_piece(self, req: Req, budget: int, pieces: list[Piece], ahead: set[PageKey | None]) -> int:
        """Compute as much of `req` as the budget allows; returns what is left of the budget."""
        assert req.prefix is not None
        ahead.add(self._next_page(req, req.prefix, len(req.ids)))
        left = len(req.ids) - int(self._table.cached_len[req.slot])
        piece = Piece(req, min(left, budget))
        self._partial = req if piece.num_tokens < left else None
        pieces.append(piece)
        return budget - piece.num_tokens

    def _next_page(self, req: Req, prefix: PrefixHandle, end: int) -> PageKey | None:
        """Where the cache would file the first page after `prefix`, if it does and that page is whole before `end`."""
        start, size = prefix.num_tokens, self._table.page_size
        if prefix.node is None or req.is_alone or start + size > end:
            return None
        return id(prefix.node), req.ids[start : start + size].tobytes()

    def _admit(self, req: Req, prefix: PrefixHandle, pages: IntArray, growth: int) -> bool:
        """Give a waiting request a slot, a lock and pages for its whole prompt, if they are there.

        `growth`: pages that it and all rows with a slot are expected to take beyond their prompts and outputs so far.
        """
        self._cache.lock(prefix)  # now, so that its pages don't count as evictable below
        size = self._table.page_size
        num_new = -(-len(req.ids) // size) - len(pages)
        if num_new + growth > self._cache.num_available_pages and self._table.num_used_slots:
            self._cache.unlock(prefix)
            return False
        req.prefix, req.state = prefix, ReqState.RUNNING
        req.num_reused = prefix.num_tokens
        if len(req.ids) == req.num_prompt:
            req.num_cached = prefix.num_tokens
        self._table.add(req, np.concatenate([pages, self._cache.allocate(num_new)]), prefix.num_tokens)
        return True
