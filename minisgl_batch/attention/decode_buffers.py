"""What decode rows need on a GPU, at addresses that never change, so that CUDA graphs can read it.

The host fills one packed buffer per step; one kernel makes the rest from it and the tables. Padding rows stand on the
dummy row with one token. Filled by the engine, read by models (through ForwardBatch) and attention backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from minisgl_batch.batch import IntArray, ScheduledBatch, SharedPrefixes
from minisgl_kernels.decode_inputs import DecodeInputs, PageLists, decode_inputs


class DecodeBuffers:
    """Static int32 buffers for up to `max_rows` decode rows.

    Attributes:
        packed: what the host fills, in the order of the fields up to `group_lens`.
        slots, kv_lens, new_pages: (max_rows,) as in ScheduledBatch; a row's length counts the token of this step.
        first_pages: (max_rows,) pages of the row's group, which its own page list leaves out.
        indptr: (max_rows + 1,) where the rows' own page lists begin in `pages`.
        group_starts: (max_groups + 2,) first row of each group; the last entry but one begins the rows without a
            group, the last is their end.
        group_lens: (max_groups + 1,) tokens of each group's prefix; 0 for groups that are not there, and for the rest.
        group_pages: (max_groups + 1, max_pages) pages of each group's prefix.
        input_ids, positions, out_loc: (max_rows,) as in ForwardBatch.
        pages, last_page_lens: the rows' own page lists, and the tokens in each row's last page.
        window_indptr, window_first_pages, window_pages: lists of the pages that layers with a window see, whatever the
            rows share; as `indptr`, `first_pages` and `pages`. Kept once a backend has asked by `need_window_lists`.
        row_pages: (max_rows, max_pages) each row's line of the page table, once a backend has asked by `need_lines`.
    """

    def __init__(
        self,
        max_rows: int,
        max_pages: int,
        max_groups: int,
        page_size: int,
        dummy_slot: int,
        device: torch.device,
        upload_into: Callable[[torch.Tensor, Sequence[IntArray]], None],
        window: int | None = None,
    ) -> None:
        """
        Args:
            window: the longest of the model's layers that have one; None: no layer has.
        """
        self._upload_into = upload_into
        self._groups_version = -1
        self.max_rows = max_rows
        self.max_groups = max_groups
        self._page_size = page_size
        self.dummy_slot = dummy_slot
        self._window = window
        sizes = [max_rows, max_rows, max_rows, max_rows, max_rows + 1, max_groups + 2, max_groups + 1]
        sizes += [max_rows, max_rows + 1]
        self.packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        fields = self.packed.split(sizes)
        self.slots, self.kv_lens, self.new_pages, self.first_pages, self.indptr = fields[:5]
        self.group_starts, self.group_lens, self.window_first_pages, self.window_indptr = fields[5:]
        self.group_pages = torch.zeros((max_groups + 1, max_pages), dtype=torch.int32, device=device)
        self.input_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.out_loc = torch.zeros_like(self.input_ids)
        self.last_page_lens = torch.ones_like(self.input_ids)
        self.pages = torch.zeros(max_rows * max_pages, dtype=torch.int32, device=device)
        self.row_pages: torch.Tensor | None = None
        self.window_pages: torch.Tensor | None = None

    def need_lines(self) -> torch.Tensor:
        """Keep `row_pages` from now on."""
        self.row_pages = torch.zeros_like(self.pages).view(self.max_rows, -1)
        return self.row_pages

    def need_window_lists(self) -> None:
        """Keep `window_lists` from now on, if some layer has a window."""
        if self._window is not None:
            # n tokens touch n / page_size pages, rounded up, and one more.
            num_pages = min(self.group_pages.shape[1], -(-self._window // self._page_size) + 1)
            self.window_pages = torch.zeros_like(self.pages[: self.max_rows * num_pages])

    def fill(self, batch: ScheduledBatch | None, num_rows: int) -> tuple[IntArray, IntArray]:
        """Put a step's decode rows here, padded to `num_rows`; None: all rows are padding.

        Returns:
            `indptr` and `kv_lens` as the host knows them.
        """
        fields = self._host_fields(batch, num_rows)
        self._upload_into(self.packed, fields)
        shared = batch.shared if batch is not None else None
        if shared is not None and shared.version != self._groups_version:
            self._upload_into(self.group_pages.view(-1), [self._group_table(shared)])
            self._groups_version = shared.version
        return fields[4], fields[1]

    def _host_fields(self, batch: ScheduledBatch | None, num_rows: int) -> list[IntArray]:
        """The fields of `packed`."""
        slots = np.full(self.max_rows, self.dummy_slot, dtype=np.int32)
        kv_lens = np.ones(self.max_rows, dtype=np.int32)
        new_pages = np.full(self.max_rows, -1, dtype=np.int32)
        first_pages = np.zeros(self.max_rows, dtype=np.int32)
        group_starts = np.zeros(self.max_groups + 2, dtype=np.int32)
        group_lens = np.zeros(self.max_groups + 1, dtype=np.int32)
        group_starts[-1] = num_rows
        if batch is not None:
            n = batch.num_decode
            slots[:n], kv_lens[:n], new_pages[:n] = batch.slots[:n], batch.kv_lens[:n], batch.new_pages
            if (shared := batch.shared) is not None:
                num_groups = len(shared.num_rows)
                ends = np.cumsum(shared.num_rows)
                first_pages[: ends[-1]] = np.repeat(shared.num_pages, shared.num_rows)
                group_starts[1 : num_groups + 1] = ends
                group_starts[num_groups + 1 : -1] = ends[-1]
                group_lens[:num_groups] = shared.num_pages * self._page_size
        own_pages = -(-kv_lens // self._page_size) - first_pages
        indptr = np.zeros(self.max_rows + 1, dtype=np.int32)
        np.cumsum(own_pages, out=indptr[1:])
        fields = [slots, kv_lens, new_pages, first_pages, indptr, group_starts, group_lens]
        return [*fields, *self._window_fields(kv_lens)]

    def _window_fields(self, kv_lens: IntArray) -> tuple[IntArray, IntArray]:
        """`window_first_pages` and `window_indptr`."""
        first_pages, indptr = np.zeros_like(kv_lens), np.zeros(self.max_rows + 1, dtype=np.int32)
        if self._window is not None and self.window_pages is not None:
            np.maximum(kv_lens - self._window, 0, out=first_pages)
            first_pages //= self._page_size
            np.cumsum(-(-kv_lens // self._page_size) - first_pages, out=indptr[1:])
        return first_pages, indptr

    def lists(self, num_rows: int) -> PageLists:
        """The rows' own page lists."""
        return PageLists(
            self.indptr[: num_rows + 1], self.first_pages[:num_rows], self.pages, self.last_page_lens[:num_rows]
        )

    def window_lists(self, num_rows: int) -> PageLists | None:
        """Those of layers with a window, None if none are kept."""
        if self.window_pages is None:
            return None
        return PageLists(
            self.window_indptr[: num_rows + 1],
            self.window_first_pages[:num_rows],
            self.window_pages,
            self.last_page_lens[:num_rows],
        )

    def _group_table(self, shared: SharedPrefixes) -> IntArray:
        """`group_pages`."""
        table = np.zeros(self.group_pages.shape, dtype=np.int32)
        ends = np.cumsum(shared.num_pages)
        for group, (end, num_pages) in enumerate(zip(ends.tolist(), shared.num_pages.tolist(), strict=True)):
            table[group, :num_pages] = shared.pages[end - num_pages : end]
        return table

    def derive(self, num_rows: int, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """On the device: enter the rows' new pages, then make everything else, for the first `num_rows` rows."""
        rows = (self.slots[:num_rows], self.kv_lens[:num_rows], self.new_pages[:num_rows])
        inputs = DecodeInputs(self.input_ids[:num_rows], self.positions[:num_rows], self.out_loc[:num_rows])
        for lists in (self.lists(num_rows), self.window_lists(num_rows)):
            if lists is not None:
                decode_inputs(*rows, page_table, token_pool, self._page_size, inputs, lists)
        if self.row_pages is not None:
            torch.index_select(page_table, 0, self.slots[:num_rows], out=self.row_pages[:num_rows])
