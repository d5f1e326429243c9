"""Slots, and every number the scheduler keeps per running row, as arrays over slots.

A slot is a line in the page table and in the token pool. The arrays here are the host's truth; the engine's copies
follow through `TableEdits`. Token positions of the row in slot s, as half-open ranges:

    [0, cached_len[s])                KV is in the pool, or a launched step will have put it there
    [cached_len[s], device_len[s])    tokens on the device (or being sampled) whose KV the next steps compute
    [device_len[s], max_len[s])       not generated yet
    [0, prompt_end[s])                what prefill computes: the prompt, and after a retraction the output so far
    [0, num_prompt[s])                the user's prompt
    [first_scored[s], num_prompt[s])  what is scored of it, if anything is
    [num_prompt[s], adjust_end[s])    output that is sampled from changed logits

Arrays over slots, not attributes of objects, so that a decode step costs a few array operations however many rows run.
Knows nothing of who owns a page.
"""

from __future__ import annotations

import numpy as np

from minisgl_batch.batch import BoolArray, IntArray, TableEdits
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.request import Req

NO_TOKEN = -1


class TableManager:
    """Hands out slots and records what their rows are."""

    def __init__(self, max_running: int, max_seq_len: int, page_size: int, dummy_page: int) -> None:
        num_rows = max_running + 1  # the last row is the dummy that padding stands on
        self.page_size = page_size
        self.max_running = max_running
        max_pages = -(-max_seq_len // page_size)
        self.page_table: IntArray = np.full((num_rows, max_pages), dummy_page, dtype=np.int32)
        self.tokens: IntArray = np.zeros((num_rows, max_seq_len + 1), dtype=np.int32)
        self.reqs: list[Req | None] = [None] * num_rows

        self.uid = np.zeros(num_rows, dtype=np.int64)
        self.generation: IntArray = np.zeros(num_rows, dtype=np.int32)  # how many rows the slot has had
        self.cached_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.device_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.max_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.prompt_end: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.in_flight: IntArray = np.zeros(num_rows, dtype=np.int32)  # launched steps that name the row
        self.running: BoolArray = np.zeros(num_rows, dtype=np.bool_)  # False while draining
        self.stop_ids: IntArray = np.full((num_rows, 4), NO_TOKEN, dtype=np.int32)  # wider when a row needs it
        self.filtered: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.adjust_end: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.constrained: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.first_scored: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_logprobs: IntArray = np.full(num_rows, -1, dtype=np.int32)
        self.num_prompt_logprobs: IntArray = np.full(num_rows, -1, dtype=np.int32)

        self._free_slots = list(range(max_running - 1, -1, -1))
        # Runs of flat positions that changed: (first, length). Their values are read when the edits are taken, so that
        # a position that changed twice is written twice with the same value.
        self._page_runs: list[tuple[int, int]] = []
        self._token_runs: list[tuple[int, int]] = []
        self._new_rows: list[tuple[int, EngineSampling, int]] = []

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_used_slots(self) -> int:
        return self.max_running - len(self._free_slots)

    def add(self, req: Req, pages: IntArray, num_cached: int) -> None:
        """Give `req` a slot; `pages` hold its ids, of which the first `num_cached` have their KV."""
        slot = self._free_slots.pop()
        req.slot = slot
        end = len(req.ids)
        self.reqs[slot] = req
        self.uid[slot] = req.uid
        self.generation[slot] += 1
        self.cached_len[slot] = num_cached
        self.device_len[slot] = self.prompt_end[slot] = end
        self.max_len[slot] = req.max_len
        self.num_prompt[slot] = req.num_prompt
        self.running[slot] = True
        sampling = req.sampling
        self._set_stop_ids(slot, sampling.stop_ids)
        self.filtered[slot] = not sampling.is_greedy and (
            sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        )
        adjusted = sampling.num_adjusted
        self.adjust_end[slot] = req.max_len if adjusted is None else min(req.num_prompt + adjusted, req.max_len)
        self.constrained[slot] = req.is_constrained
        self.first_scored[slot] = req.first_scored
        self.num_logprobs[slot] = sampling.num_logprobs
        self.num_prompt_logprobs[slot] = sampling.num_prompt_logprobs if req.scores_prompt else -1
        self.tokens[slot, :end] = req.ids
        # The model reads no token whose KV is cached; the sampler may.
        first = 0 if sampling.reads_tokens else num_cached
        self._token_runs.append((slot * self.tokens.shape[1] + first, end - first))
        self.set_pages(slot, 0, pages)
        self._new_rows.append((slot, sampling, req.num_prompt))

    def remove(self, req: Req) -> None:
        """Take the slot back; no step in flight may name it."""
        slot = req.slot
        assert self.in_flight[slot] == 0
        self.reqs[slot] = None
        self.running[slot] = False
        req.slot = -1
        self._free_slots.append(slot)

    def end_prompt_logprobs(self, slot: int) -> None:
        """The row's prompt has all of its log-probabilities, also should the row be retracted."""
        req = self.reqs[slot]
        assert req is not None
        req.scores_prompt = False
        self.num_prompt_logprobs[slot] = -1

    def set_pages(self, slot: int, first: int, pages: IntArray) -> None:
        """The row's pages from its page number `first` on."""
        self.page_table[slot, first : first + len(pages)] = pages
        self._page_runs.append((slot * self.page_table.shape[1] + first, len(pages)))

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def append_pages(self, slots: IntArray, pages: IntArray) -> None:
        """One more page for each row, for the token at its `cached_len`; the step itself tells the engine."""
        self.page_table[slots, self.cached_len[slots] // self.page_size] = pages

    def num_row_pages(self, slot: int) -> int:
        """How many pages the row has."""
        return int(-(-max(self.cached_len[slot], self.prompt_end[slot]) // self.page_size))

    def take_edits(self) -> TableEdits:
        """All changes since the last call."""
        page_index, token_index = _flatten(self._page_runs), _flatten(self._token_runs)
        edits = TableEdits(
            page_index=page_index,
            pages=self.page_table.reshape(-1)[page_index],
            token_index=token_index,
            tokens=self.tokens.reshape(-1)[token_index],
            new_rows=self._new_rows,
        )
        self._page_runs, self._token_runs, self._new_rows = [], [], []
        return edits


def _flatten(runs: list[tuple[int, int]]) -> IntArray:
    """The positions of runs given as (first, length)."""
    if not runs:
        return np.empty(0, dtype=np.int32)
    first, length = np.array(runs, dtype=np.int32).T
    offset = np.cumsum(length, dtype=np.int32) - length
    index: IntArray = np.arange(int(length.sum()), dtype=np.int32) + np.repeat(first - offset, length)
    return index
