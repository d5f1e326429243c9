"""Joins the attention over two parts of the same tokens' KV, such as a shared prefix and each row's own pages.

Triton, or the twin.
"""

from __future__ import annotations

import torch

from minisgl_kernels import reference_attention
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    lse_a_is_log2: bool,
    lse_b_is_log2: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over the union of two sets of keys, from the attention over each.

    A part with an LSE of -inf (or +inf, as flash-attn 2 marks it) saw no key: the result is the other part exactly,
    whatever the empty part's output holds, and zeros where both are empty.

    Args:
        out_a, out_b: (num_tokens, num_heads, head_dim), contiguous; each part's output.
        lse_a, lse_b: (num_tokens, num_heads) float32, any strides: a transposed view where a library gives
            (num_heads, num_tokens). The logarithm of the sum of each part's exponentiated scores.
        lse_a_is_log2, lse_b_is_log2: whether that is the logarithm to base 2 (FlashInfer), not the natural one
            (flash-attn).
        out: where to write; may be `out_a` or `out_b`.

    Returns:
        (num_tokens, num_heads, head_dim), out_a's dtype.
    """
    if out is None:
        out = torch.empty_like(out_a)
    if not support.runs_kernels(out_a):
        return out.copy_(reference_attention.merge_states(out_a, lse_a, out_b, lse_b, lse_a_is_log2, lse_b_is_log2))
    num_tokens, num_heads, head_dim = out_a.shape
    if num_tokens:
        block_heads, block_dims = 8, support.next_power_of_2(head_dim)
        pdl = support.uses_pdl(out_a)
        num_blocks = -(-num_heads // block_heads)
        _kernel[(num_tokens * num_blocks,)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            *lse_a.stride(),
            *lse_b.stride(),
            num_heads=num_heads,
            head_dim=head_dim,
            a_is_log2=lse_a_is_log2,
            b_is_log2=lse_b_is_log2,
            block_heads=block_heads,
            block_dims=block_dims,
            pdl=pdl,
            num_warps=max(1, block_heads * block_dims // 256),
            launch_pdl=pdl,
        )
    return out


@jit
def _kernel(
    out_a: tl.tensor,
    lse_a: tl.tensor,
    out_b: tl.tensor,
    lse_b: tl.tensor,
    out: tl.tensor,
    a_stride_token: tl.tensor,
    a_stride_head: tl.tensor,
    b_stride_token: tl.tensor,
    b_stride_head: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    a_is_log2: tl.constexpr,
    b_is_log2: tl.constexpr,
    block_heads: tl.constexpr,
    block_dims: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per token and block of heads."""
    num_blocks: tl.constexpr = (num_heads + block_heads - 1) // block_heads
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    heads = tl.program_id(0) % num_blocks * block_heads + tl.arange(0, block_heads)
    dims = tl.arange(0, block_dims)[None, :]
    inside = (heads < num_heads)[:, None] & (dims < head_dim)
    place = (token * num_heads + heads)[:, None] * head_dim + dims
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    log2e: tl.constexpr = 1.4426950408889634
    empty = float("-inf")
    log_a = tl.load(lse_a + token * a_stride_token + heads * a_stride_head, mask=heads < num_heads, other=0.0)
    log_b = tl.load(lse_b + token * b_stride_token + heads * b_stride_head, mask=heads < num_heads, other=0.0)
    log_a = tl.where(log_a == float("inf"), empty, log_a if a_is_log2 else log_a * log2e)
    log_b = tl.where(log_b == float("inf"), empty, log_b if b_is_log2 else log_b * log2e)
    highest = tl.maximum(log_a, log_b)
    highest = tl.where(highest == empty, 0.0, highest)
    weight_a, weight_b = tl.exp2(log_a - highest)[:, None], tl.exp2(log_b - highest)[:, None]
    total = weight_a + weight_b
    a = tl.load(out_a + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(out_b + place, mask=inside, other=0.0).to(tl.float32)
    # An empty part may hold anything, NaN too, which a weight of 0 wouldn't take away.
    a = tl.where(weight_a == 0.0, 0.0, a * weight_a)
    b = tl.where(weight_b == 0.0, 0.0, b * weight_b)
    merged = (a + b) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=inside)
