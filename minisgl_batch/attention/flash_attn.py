"""flash-attn's paged varlen attention, whichever generation of the library is installed, as one function.

4 is `flash_attn.cute` (any page size), 3 is `flash_attn_interface` (any page size), 2 is `flash_attn` (pages of a
multiple of 256 tokens). 3 and 2 have not been run by this project. Called by the `fa` and two-level backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

from minisgl_batch.attention.base import AttnSpec
from minisgl_batch.errors import InvalidParameterError
from minisgl_kernels.cpp import cache_dir


@dataclass(frozen=True, slots=True)
class PagedSequences:
    """Sequences of one call.

    Attributes:
        q_starts: (num_sequences + 1,) int32; sequence i has queries [q_starts[i], q_starts[i + 1]).
        kv_lens: (num_sequences,) int32; the queries are the last of so many tokens, or see all of them.
        pages: (num_sequences, max_pages) int32.
        max_q_len, max_kv_len: bounds of the above, known to the host.
    """

    q_starts: torch.Tensor
    kv_lens: torch.Tensor
    pages: torch.Tensor
    max_q_len: int
    max_kv_len: int


FlashAttention: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PagedSequences, AttnSpec, bool],
    tuple[torch.Tensor, torch.Tensor],
]
"""(q, k_pool, v_pool, sequences, spec, causal) -> (out (num_tokens, num_heads, head_dim), lse (num_heads, num_tokens),
natural logarithm)."""


@cache
def load(page_size: int) -> FlashAttention:
    """The newest generation that is installed.

    Raises:
        InvalidParameterError: none is, or it can't read pages of this size.
    """
    generation = installed_generation()
    if generation is None:
        raise InvalidParameterError(
            "attention_backend", "fa needs flash-attn: pip install 'minisgl-batch[cuda]', or choose fi or triton"
        )
    if generation == 2 and page_size % 256:
        raise InvalidParameterError("page_size", f"flash-attn 2 reads pages of 256 tokens, not of {page_size}")
    return {4: _load_4, 3: _load_3, 2: _load_2}[generation]()


def installed_generation() -> int | None:
    """4, 3 or 2; None without flash-attn."""
    if find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None:
        return 4
    if find_spec("flash_attn_interface") is not None:
        return 3
    return 2 if find_spec("flash_attn") is not None else None


def _load_4() -> FlashAttention:
    # It compiles each kind of call for some seconds, and forgets it with the process unless it is told not to.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_dir() / "flash_attn"))
    from flash_attn.cute import flash_attn_varlen_func

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: PagedSequences, spec: AttnSpec, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=sequences.q_starts,
            max_seqlen_q=sequences.max_q_len,
            max_seqlen_k=sequences.max_kv_len,
            seqused_k=sequences.kv_lens,
            page_table=sequences.pages,
            softmax_scale=spec.scale,
            causal=causal,
            window_size=_window(spec, None),
            return_lse=True,
        )
        return out, lse

    return attend


def _load_3() -> FlashAttention:
    from flash_attn_interface import flash_attn_with_kvcache

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: PagedSequences, spec: AttnSpec, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=sequences.kv_lens,
            page_table=sequences.pages,
            cu_seqlens_q=sequences.q_starts,
            max_seqlen_q=sequences.max_q_len,
            softmax_scale=spec.scale,
            causal=causal,
            window_size=_window(spec, -1),
            return_softmax_lse=True,
        )
        return out, lse

    return attend


def _load_2() -> FlashAttention:
    from flash_attn import flash_attn_varlen_func

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: PagedSequences, spec: AttnSpec, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv_starts = torch.nn.functional.pad(sequences.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        out, lse, _ = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=sequences.q_starts,
            cu_seqlens_k=kv_starts,
            max_seqlen_q=sequences.max_q_len,
            max_seqlen_k=sequences.max_kv_len,
            softmax_scale=spec.scale,
            causal=causal,
            window_size=_window(spec, -1),
            block_table=sequences.pages,
            return_attn_probs=True,
        )
        return out, lse

    return attend


def _window(spec: AttnSpec, unlimited: int | None) -> tuple[Any, Any]:
    """(left, right) tokens that a query sees besides itself, in the library's way of saying "all"."""
    return (unlimited, unlimited) if spec.window is None else (spec.window - 1, 0)
