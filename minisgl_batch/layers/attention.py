"""Self-attention: projections around a call that fills the KV pool and a call of the attention backend.

Knows nothing of pages or of how a step was scheduled: that is between the backend and the step in the context. Used
by the models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from minisgl_batch.attention.base import AttnSpec, ForwardContext
from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.layers.base import Layer, Part, new_parameter
from minisgl_batch.layers.fp8_config import Fp8Config
from minisgl_batch.layers.linear import LinearQKVMerged, LinearRowParallel
from minisgl_batch.layers.norm import RMSNorm
from minisgl_batch.layers.rotary import Rotation
from minisgl_kernels.e4m3 import E4M3, UNSCALED
from minisgl_kernels.matmul import Operand
from minisgl_kernels.norm_rope_store import norm_rope_store


class SelfAttention(Layer):
    """This rank's heads of one layer's attention.

    Args:
        layer: its number in the model, which the backend finds its part of the KV pool by.
        qkv_bias, output_bias: whether the projections have one.
        qk_norm_eps: queries and keys are normalised per head before the rotation; None: they aren't.
        qk_norm_offset: what is added to these norms' weights.
        scale: factor on q·k.
        window: a token sees this many tokens back (itself included); None sees all.
        has_sinks: each head has an attention sink, see `AttnSpec`.
        rotary_dim: how many of a head's dimensions the rotary embedding turns.
        qkv_fp8, output_fp8: how the projections' weights are in FP8, if they are.

    Attributes:
        reads_fp8: see `Weight`.
        kv_scales: of keys and of values in an e4m3 pool.

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
        has_sinks: bool,
        rotary_dim: int,
        qkv_fp8: Fp8Config | None = None,
        output_fp8: Fp8Config | None = None,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._layer = layer
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
            fp8=qkv_fp8,
        )
        self.o_proj = LinearRowParallel(
            num_heads * head_dim, hidden_size, bias=output_bias, tp=tp, dtype=dtype, device=device, fp8=output_fp8
        )
        self.kv_scales = UNSCALED
        self.reads_fp8 = self.qkv_proj.weight.reads_fp8
        heads = self.qkv_proj.heads
        self._all_heads, self._first_head = num_heads, heads.q_start
        self.sinks = new_parameter((heads.num_heads,), torch.float32, device) if has_sinks else None
        self._spec = AttnSpec(scale, window, self.sinks)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device, offset=qk_norm_offset)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device, offset=qk_norm_offset)

    def forward(
        self, x: Operand, rotation: Rotation, ctx: ForwardContext, keep: torch.Tensor | None = None
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
        scales = self.kv_scales if ctx.pool.dtype == E4M3 else UNSCALED
        q = norm_rope_store(self.qkv_proj(x), norms, eps, rotation.rope, ctx.batch.out_loc, k_pool, v_pool, scales)
        if rotation.query_scale is not None:
            q.mul_(rotation.query_scale)
        # Backends read the pool as it is.
        spec = self._spec if scales[0] == 1.0 else replace(self._spec, scale=self._spec.scale * scales[0])
        out = ctx.attention.forward(q, self._layer, spec, ctx.batch)
        if scales[1] != 1.0:
            out.mul_(scales[1])
        out = out.flatten(1)
        attended: torch.Tensor = self.o_proj(out if keep is None else out[keep])
        return attended

    def parts(self) -> Iterator[Part]:
        if self.sinks is not None:
            yield Part("sinks", self.sinks, (self._all_heads,), start=self._first_head)
