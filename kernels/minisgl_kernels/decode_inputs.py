"""What a decode step reads, made on the device in one launch: token ids, positions, KV places and page lists.

A decode step changes nothing but lengths and, at page boundaries, a page per row; so this is all that stands between
the host's decision and the model. Triton, or the twin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_kernels import reference
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import jit, tl


class DecodeInputs(NamedTuple):
    """The model's inputs, (num_rows,) int32 each: see `ForwardBatch`."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor


class PageLists(NamedTuple):
    """Each row's pages as FlashInfer reads them, int32.

    `indptr` and `first_pages` are inputs: row i gets its pages from number `first_pages[i]` on, at
    `indices[indptr[i] : indptr[i + 1]]`. `indices` and `last_page_lens` are filled.
    """

    indptr: torch.Tensor  # (num_rows + 1,)
    first_pages: torch.Tensor  # (num_rows,)
    indices: torch.Tensor  # (at least indptr[-1],)
    last_page_lens: torch.Tensor  # (num_rows,) tokens in the row's last page, 1 to page_size


def decode_inputs(
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    new_pages: torch.Tensor,
    page_table: torch.Tensor,
    token_pool: torch.Tensor,
    page_size: int,
    inputs: DecodeInputs,
    lists: PageLists | None = None,
) -> None:
    """Enter each row's new page into the page table, then fill `inputs` and `lists`.

    Rows have different slots, but for padding, which has no new pages: each program writes to its own line only.

    Args:
        slots: (num_rows,) int32; each row's line of the tables.
        kv_lens: (num_rows,) int32, at least 1; tokens of the row with the one that this step computes.
        new_pages: (num_rows,) int32; the page that starts with this step's token, or -1.
        page_table: (num_lines, max_pages) int32, contiguous; changed in place.
        token_pool: (num_lines, width) int32, contiguous. A token of -1, which a row that fails has, is read as 0.
        page_size: tokens per page.
        inputs, lists: filled in place.
    """
    if not support.runs_kernels(slots):
        reference.decode_inputs(slots, kv_lens, new_pages, page_table, token_pool, page_size, *inputs, lists)
        return
    if not len(slots):
        return
    _kernel[(len(slots),)](
        slots,
        kv_lens,
        new_pages,
        page_table,
        token_pool,
        *inputs,
        *(lists or (slots, slots, slots, slots)),
        page_table.stride(0),
        token_pool.stride(0),
        page_size=page_size,
        has_lists=lists is not None,
        block=512,
        num_warps=4,
    )


@jit
def _kernel(
    slots: tl.tensor,
    kv_lens: tl.tensor,
    new_pages: tl.tensor,
    page_table: tl.tensor,
    token_pool: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    out_loc: tl.tensor,
    indptr: tl.tensor,
    first_pages: tl.tensor,
    indices: tl.tensor,
    last_page_lens: tl.tensor,
    table_stride: tl.tensor,
    token_stride: tl.tensor,
    page_size: tl.constexpr,
    has_lists: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(kv_lens + row) - 1
    new_page = tl.load(new_pages + row)
    line = page_table + slot * table_stride
    last = position // page_size
    page = new_page
    if new_page >= 0:
        tl.store(line + last, new_page)
    else:
        page = tl.load(line + last)
    tl.store(input_ids + row, tl.maximum(tl.load(token_pool + slot * token_stride + position), 0))
    tl.store(positions + row, position)
    tl.store(out_loc + row, page * page_size + position % page_size)
    if has_lists:
        tl.store(last_page_lens + row, position % page_size + 1)
        begin = tl.load(indptr + row)
        num_pages = tl.load(indptr + row + 1) - begin
        first_page = tl.load(first_pages + row)
        start = 0
        while start < num_pages:
            number = start + tl.arange(0, block)
            inside = number < num_pages
            pages = tl.load(line + first_page + number, mask=inside)
            # The new page's store may not have reached the other threads' loads yet.
            pages = tl.where(first_page + number == last, page, pages)
            tl.store(indices + begin + number, pages, mask=inside)
            start += block
