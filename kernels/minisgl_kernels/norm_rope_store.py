"""What stands between the QKV projection and attention, in one launch: norms of queries and keys, rotation, KV store.

CUDA C++, Triton, or the twin.
"""

from __future__ import annotations

import torch

from minisgl_kernels import cuda, reference
from minisgl_kernels import triton_support as support
from minisgl_kernels.e4m3 import E4M3, E4M3_MAX, UNSCALED
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_CUDA_HEAD_DIMS = (64, 128, 256)


def norm_rope_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rope: torch.Tensor,
    out_loc: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scales: tuple[float, float] = UNSCALED,
) -> torch.Tensor:
    """Normalise and rotate each head's query and key, and write keys and values into one layer of the pool.

    The norm is as in `add_rms_norm`; the rotation is computed in float32 and rounded once. Reads qkv once and writes
    as much.

    Args:
        qkv: (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), [queries | keys | values], each row contiguous.
        norms: weights of the queries' and the keys' norm, (head_dim,) each, qkv's dtype or float32; None: there are no
            norms.
        eps: of the norms.
        rope: (num_tokens, 2, head_dim), contiguous, qkv's dtype: the cosines of the token's head_dim / 2 angles, twice,
            and their sines, first negated and then as they are. Dimension i turns together with i + head_dim / 2.
        out_loc: (num_tokens,) int32, page * page_size + offset. Padding tokens share the dummy's location.
        k_pool, v_pool: (num_pages, page_size, num_kv_heads, head_dim), contiguous, qkv's dtype or e4m3, to which the
            rounded keys and values are rounded.
        scales: of keys and of values, in e4m3.

    Returns:
        (num_tokens, num_heads, head_dim): the queries. Contiguous from a kernel, and within each token from the twin.
    """
    if not support.runs_kernels(qkv):
        return reference.norm_rope_store(qkv, norms, eps, rope, out_loc, k_pool, v_pool, scales)
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = k_pool.shape[2:]
    num_heads = width // head_dim - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    q_norm, k_norm = norms or (qkv, qkv)
    tensors = (qkv, q_norm, k_norm, rope, out_loc, q, k_pool, v_pool)
    fits = head_dim in _CUDA_HEAD_DIMS and qkv.stride(0) % 8 == 0 and q_norm.dtype == qkv.dtype
    kernels = cuda.layer_kernels(qkv) if fits else None
    inverse_scales = 1.0 / scales[0], 1.0 / scales[1]
    if kernels is not None:
        kernels.norm_rope_store(*tensors, eps, norms is not None, *inverse_scales)
        return q
    block_heads = 8 if num_kv_heads >= 8 else 4
    block_half = support.next_power_of_2(head_dim // 2)
    pdl = support.uses_pdl(qkv)
    num_blocks = -(-num_heads // block_heads) + 2 * -(-num_kv_heads // block_heads)
    _kernel[(num_tokens * num_blocks,)](
        *tensors,
        qkv.stride(0),
        eps,
        *inverse_scales,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_heads=block_heads,
        block_half=block_half,
        has_norms=norms is not None,
        quantizes=k_pool.dtype == E4M3,
        max_stored=E4M3_MAX,
        pdl=pdl,
        num_warps=max(1, block_heads * block_half // 256),  # 8 elements of each half per thread
        launch_pdl=pdl,
    )
    return q


@jit
def _kernel(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    rope: tl.tensor,
    out_loc: tl.tensor,
    q_out: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    inverse_k_scale: tl.tensor,
    inverse_v_scale: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    has_norms: tl.constexpr,
    quantizes: tl.constexpr,
    max_stored: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per token and block of heads, all of them queries, keys or values.

    A head is held as its two halves, so that the rotation needs no exchange between threads.
    """
    q_blocks: tl.constexpr = (num_heads + block_heads - 1) // block_heads
    kv_blocks: tl.constexpr = (num_kv_heads + block_heads - 1) // block_heads
    token = (tl.program_id(0) // (q_blocks + 2 * kv_blocks)).to(tl.int64)
    block = tl.program_id(0) % (q_blocks + 2 * kv_blocks)
    half: tl.constexpr = head_dim // 2
    is_q = block < q_blocks
    is_v = block >= q_blocks + kv_blocks

    # As wide as a tile everywhere: what all heads share is loaded in their layout then, 16 bytes at a time.
    dims = tl.broadcast_to(tl.arange(0, block_half)[None, :], (block_heads, block_half))
    heads = tl.where(is_q, block, (block - q_blocks) % kv_blocks) * block_heads + tl.arange(0, block_heads)[:, None]
    inside = (heads < tl.where(is_q, num_heads, num_kv_heads)) & (dims < half)
    low = heads * head_dim + dims
    first = tl.where(is_q, 0, tl.where(is_v, num_heads + num_kv_heads, num_heads)) * head_dim
    source = qkv + token * qkv_stride + first + low

    if has_norms:
        norm = k_norm
        if is_q:
            norm = q_norm
        scale_1 = tl.load(norm + dims, mask=dims < half).to(tl.float32)
        scale_2 = tl.load(norm + half + dims, mask=dims < half).to(tl.float32)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()

    x_1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    x_2 = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    angles = rope + token * (2 * head_dim) + dims
    cos = tl.load(angles, mask=(dims < half) & (not is_v)).to(tl.float32)
    sin = tl.load(angles + 3 * half, mask=(dims < half) & (not is_v)).to(tl.float32)
    location = tl.load(out_loc + token).to(tl.int64) * (num_kv_heads * head_dim)

    dtype = q_out.dtype.element_ty
    if not is_v:
        if has_norms:
            squares = tl.sum(x_1 * x_1 + x_2 * x_2, axis=1, keep_dims=True)
            inverse = tl.rsqrt(squares / head_dim + eps)
            weight_dtype = q_norm.dtype.element_ty
            x_1 = ((x_1 * inverse).to(weight_dtype).to(tl.float32) * scale_1).to(dtype).to(tl.float32)
            x_2 = ((x_2 * inverse).to(weight_dtype).to(tl.float32) * scale_2).to(dtype).to(tl.float32)
        turned_1 = x_1 * cos - x_2 * sin
        x_2 = x_2 * cos + x_1 * sin
        x_1 = turned_1
    x_1, x_2 = x_1.to(dtype), x_2.to(dtype)
    if is_q:
        target = q_out + token * (num_heads * head_dim) + low
        tl.store(target, x_1, mask=inside)
        tl.store(target + half, x_2, mask=inside)
    else:
        stored = k_pool + location + low
        if is_v:
            stored = v_pool + location + low
        if quantizes:
            factor = tl.where(is_v, inverse_v_scale, inverse_k_scale)
            tl.store(stored, _to_e4m3(x_1, factor, max_stored), mask=inside)
            tl.store(stored + half, _to_e4m3(x_2, factor, max_stored), mask=inside)
        else:
            tl.store(stored, x_1, mask=inside)
            tl.store(stored + half, x_2, mask=inside)


@jit
def _to_e4m3(x: tl.tensor, inverse_scale: tl.tensor, max_stored: tl.constexpr) -> tl.tensor:
    scaled = x.to(tl.float32) * inverse_scale
    return tl.clamp(scaled, -max_stored, max_stored, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
