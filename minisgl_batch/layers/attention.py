"""Self-attention: projections around a call that fills the KV pool and a call of the attention backend.

Knows nothing of pages or of how a step was scheduled: that is between the backend and the step in the context. Used
by the models.
"""

from __future__ import annotations

import torch
from torch import nn

from minisgl_batch.attention.base import AttnSpec, ForwardContext
from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.layers.linear import LinearQKVMerged, LinearRowParallel
from minisgl_batch.layers.norm import RMSNorm
from minisgl_batch.layers.rotary import Rotation
from minisgl_kernels.norm_rope_store import norm_rope_store


class SelfAttention(nn.Module):
    """This rank's heads of one layer's attention.

    Args:
        layer: its number in the model, which the backend finds its part of the KV pool by.
        qkv_bias, output_bias: whether the projections have one.
        qk_norm_eps: queries and keys are normalised per head before the rotation; None: they aren't.
        qk_norm_offset: what is added to these norms' weights.
        scale: factor on q·k.
        window: a token sees this many tokens back (itself included); None sees all.
        rotary_dim: how many of a head's dimensions the rotary embedding turns.

    Raises:
        InvalidParameterError: the group's size doesn't suit the heads; lists the sizes that do.
    """

    def __init__(
        self,
        *,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None,
        qk_norm_offset: float,
        scale: float,
        window: int | None,
        rotary_dim: int,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._layer = layer
        self._spec = AttnSpec(scale=scale, window=window)
        self.qkv_proj = LinearQKVMerged(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            bias=qkv_bias,
            tp=tp,
            dtype=dtype,
            device=device,
            rotary_dim=rotary_dim,
        )
        self.o_proj = LinearRowParallel(
            num_heads * head_dim, hidden_size, bias=output_bias, tp=tp, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device, offset=qk_norm_offset)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device, offset=qk_norm_offset)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, ctx: ForwardContext, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend.

        Args:
            x: (num_tokens, hidden_size).
            rotation: what `RotaryEmbedding` gives for these tokens.
            keep: (num_kept,) tokens whose result is wanted; None: all.

        Returns:
            This rank's share of (num_tokens or num_kept, hidden_size).
        """
        norms, eps = None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        k_pool, v_pool = ctx.pool.k(self._layer), ctx.pool.v(self._layer)
        q = norm_rope_store(self.qkv_proj(x), norms, eps, rotation.rope, ctx.batch.out_loc, k_pool, v_pool)
        if rotation.query_scale is not None:
            q.mul_(rotation.query_scale)
        out = ctx.attention.forward(q, self._layer, self._spec, ctx.batch)
        out = out.flatten(1)
        attended: torch.Tensor = self.o_proj(out if keep is None else out[keep])
        return attended
