"""Attention of decode rows over their page lists on a GPU: CUDA C++, or the twin.

Every multiprocessor gets an equal share of all rows' pages, so ragged lengths cost nothing, and the host plans nothing.
Reads each key and value once: num_tokens * num_kv_heads * head_dim * 4 bytes, or 2 in e4m3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_kernels import cuda, reference_attention
from minisgl_kernels.decode_inputs import PageLists

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
TILE = 16  # tokens; a page holds that many times a power of two
_WORKERS_PER_MULTIPROCESSOR = 8
_NO_WINDOW = 2**31 - 1


class DecodeWorkspace(NamedTuple):
    """Memory for rows that several workers share; steps on one stream may use it in turn."""

    parts: torch.Tensor  # (2 * shares, num_kv_heads, group, head_dim + 4) float32
    arrivals: torch.Tensor  # (max_rows, num_kv_heads) int32, zeros between calls


def can_run(device: torch.device, dtype: torch.dtype, group: int, head_dim: int, page_size: int) -> bool:
    """Whether there is a kernel for such heads (`group` queries per KV head) and pages."""
    tiles = page_size // TILE
    fits_pages = page_size == tiles * TILE and tiles.bit_count() == 1
    fits = group <= MAX_GROUP and head_dim in HEAD_DIMS and fits_pages
    return fits and cuda.layer_kernels(torch.empty(0, dtype=dtype, device=device)) is not None


def make_workspace(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    num_workers: int | None = None,
) -> DecodeWorkspace:
    """
    Args:
        max_rows: of a call.
        num_workers: into which the work is divided; by default as many as the device runs at a time.
    """
    if num_workers is None:
        num_workers = torch.cuda.get_device_properties(device).multi_processor_count * _WORKERS_PER_MULTIPROCESSOR
    num_shares, group = max(1, num_workers // num_kv_heads), num_heads // num_kv_heads
    return DecodeWorkspace(
        parts=torch.empty((2 * num_shares, num_kv_heads, group, head_dim + 4), dtype=torch.float32, device=device),
        arrivals=torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device),
    )


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    lists: PageLists,
    scale: float,
    workspace: DecodeWorkspace,
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each row's one query token attends over the tokens of its page list, itself included.

    The lists must have been complete before the kernel ahead on the stream began: they are read before it has ended.

    Args:
        q: (num_rows, num_heads, head_dim), contiguous, bfloat16 or float16.
        k_pool, v_pool: (num_pages, page_size, num_kv_heads, head_dim), contiguous, q's dtype or e4m3.
        lists: the rows' pages, at least one each.
        scale: factor on q·k.
        workspace: made for such heads.
        prefix: attention over other keys of the same rows, to be joined: the output, like q, and (num_heads, num_rows)
            float32 the natural logarithms of the sums of its weights; infinite for a row that saw no key there.
        window: a row sees this many of its last tokens, where its list has as many or more.
        sinks: (num_heads,) float32, each head's score of one more key, whose value is zero.

    Returns:
        (num_rows, num_heads, head_dim), q's dtype, contiguous.
    """
    kernels = cuda.layer_kernels(q)
    if kernels is None:
        return reference_attention.paged_decode(q, k_pool, v_pool, lists, scale, prefix, window, sinks)
    out = torch.empty_like(q)
    assert prefix is None or (prefix[0].is_contiguous() and prefix[1].is_contiguous())
    prefix_out, prefix_lse = prefix or (q, workspace.parts)
    kernels.paged_decode(
        q,
        k_pool,
        v_pool,
        lists.indptr,
        lists.indices,
        lists.last_page_lens,
        prefix_out,
        prefix_lse,
        workspace.parts if sinks is None else sinks,
        out,
        workspace.parts,
        workspace.arrivals,
        scale,
        prefix is not None,
        sinks is not None,
        window or _NO_WINDOW,
    )
    return out
