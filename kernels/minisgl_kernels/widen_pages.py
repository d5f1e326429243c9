"""Pages of an e4m3 pool in the compute type, for attention libraries that read no other: CUDA C++, or the twin."""

from __future__ import annotations

from functools import cache

import torch

from minisgl_kernels import cuda, reference

_BLOCKS_PER_MULTIPROCESSOR = 16


def widen_pages(
    k_pool: torch.Tensor, v_pool: torch.Tensor, pages: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor
) -> None:
    """Write some pages of a layer to the same places in other memory.

    Reads num_pages * page bytes and writes twice as many.

    Args:
        k_pool, v_pool: (num_pages, page_size, num_kv_heads, head_dim) e4m3, contiguous.
        pages: (num_entries,) int32; an entry that equals the one before costs nothing.
        k_out, v_out: of the pools' shape, bfloat16 or float16, contiguous.
    """
    kernels = cuda.layer_kernels(k_out)
    if kernels is None:
        reference.widen_pages(k_pool, v_pool, pages, k_out, v_out)
    elif len(pages):
        kernels.widen_pages(k_pool, v_pool, pages, k_out, v_out, _max_blocks(k_out.device))


@cache
def _max_blocks(device: torch.device) -> int:
    if device.type == "cpu":
        return 6  # in the emulator: for fewer than all entries
    return _BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
