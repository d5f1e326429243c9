"""Plain twins of every kernel, in torch and numpy: what the kernels are tested against, and what CPUs run.

Those of attention, sampling, experts and FP8 have modules of their own, `reference_*.py`. Knows tensors only: no
requests, no schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from minisgl_kernels.e4m3 import E4M3, UNSCALED, to_e4m3

if TYPE_CHECKING:
    from minisgl_kernels.decode_inputs import PageLists

# ------------------------------------------------------------------ layers


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension, (..., size) -> the same shape, contiguous.

    The weight is applied after rounding to its dtype: that is the order of the models' reference code.
    """
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `minisgl_kernels.add_rms_norm`."""
    stream = x if residual is None else residual.add_(x)
    return rms_norm(stream, weight, eps), stream


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin of `minisgl_kernels.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin of `minisgl_kernels.silu_and_mul.gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def embedding(ids: torch.Tensor, weight: torch.Tensor, vocab_range: range) -> torch.Tensor:
    """The twin of `minisgl_kernels.embedding`."""
    local_ids = ids - vocab_range.start
    elsewhere = (local_ids < 0) | (local_ids >= len(vocab_range))
    rows = F.embedding(local_ids.masked_fill_(elsewhere, 0), weight)
    return rows.masked_fill_(elsewhere.unsqueeze(1), 0.0)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: dimension i turns together with dimension i + head_dim / 2.

    Args:
        x: (num_tokens, num_heads, head_dim).
        rope: (num_tokens, 2, head_dim), x's dtype: the cosines of the token's head_dim / 2 angles, twice, and their
            sines, first negated and then as they are.

    Returns:
        x's shape, contiguous.
    """
    cos, sin = rope.unsqueeze(2).unbind(1)  # (num_tokens, 1, head_dim)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


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
    """The twin of `minisgl_kernels.norm_rope_store`, which rounds the rotation's products as well.

    Queries and keys are handled as one tensor, because few calls count most at few tokens; so the queries that it
    returns aren't contiguous from token to token.
    """
    num_kv_heads, head_dim = k_pool.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None:
        qk = F.rms_norm(qk.float(), (head_dim,), None, eps).to(norms[0].dtype)
        qk[:, :num_heads].mul_(norms[0])
        qk[:, num_heads:].mul_(norms[1])
        qk = qk.to(qkv.dtype)
    rotated = rotate(qk, rope)
    store_kv(rotated[:, num_heads:], v, k_pool, v_pool, out_loc, scales)
    return rotated[:, :num_heads]


# ----------------------------------------------------------------- KV pool


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out_loc: torch.Tensor,
    scales: tuple[float, float] = UNSCALED,
) -> None:
    """Write this step's keys and values into one layer of the pool.

    Args:
        k, v: (num_tokens, num_kv_heads, head_dim).
        k_pool, v_pool: (num_pages, page_size, num_kv_heads, head_dim), k's dtype or e4m3.
        out_loc: (num_tokens,) int32, page * page_size + offset. Padding tokens share the dummy's location.
        scales: of keys and of values, in e4m3.
    """
    where = out_loc.long()
    if k_pool.dtype == E4M3:  # moved as bytes: torch on a CPU knows little of such floats
        k, v = (to_e4m3(x, scale).view(torch.uint8) for x, scale in zip((k, v), scales, strict=True))
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    k_pool.view(-1, *k_pool.shape[2:]).index_copy_(0, where, k)
    v_pool.view(-1, *v_pool.shape[2:]).index_copy_(0, where, v)


def widen_pages(
    k_pool: torch.Tensor, v_pool: torch.Tensor, pages: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor
) -> None:
    """The twin of `minisgl_kernels.widen_pages`."""
    for pool, out in ((k_pool, k_out), (v_pool, v_out)):
        out[pages.long()] = pool[pages.long()].to(out.dtype)


def common_prefix_len(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many leading ids two sequences have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


# ------------------------------------------------------------- step inputs


def decode_inputs(
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    new_pages: torch.Tensor,
    page_table: torch.Tensor,
    token_pool: torch.Tensor,
    page_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    lists: PageLists | None,
) -> None:
    """The twin of `minisgl_kernels.decode_inputs`. Reads `lists.indptr` back, so no CUDA graph can hold it."""
    lines, position = slots.long(), kv_lens.long() - 1
    column, offset = position // page_size, position % page_size
    grows = new_pages >= 0
    page_table[lines[grows], column[grows]] = new_pages[grows]
    input_ids.copy_(token_pool[lines, position].clamp_min_(0))
    positions.copy_(position)
    out_loc.copy_(page_table[lines, column] * page_size + offset)
    if lists is not None:
        lists.last_page_lens.copy_(offset + 1)
        indptr, first_pages = lists.indptr.tolist(), lists.first_pages.tolist()
        for i, (line, first) in enumerate(zip(lines.tolist(), first_pages, strict=True)):
            num_pages = indptr[i + 1] - indptr[i]
            lists.indices[indptr[i] : indptr[i + 1]] = page_table[line, first : first + num_pages]


# ------------------------------------------------------------- collectives


def all_reduce(parts: list[torch.Tensor]) -> torch.Tensor:
    """`one_shot.OneShotAllReduce` of what each rank gives, by rank: summed in float32 in that order, then rounded."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
