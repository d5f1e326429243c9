"""Rotary position embeddings: a table of cosines and sines per model.

Dimension i of a head is rotated together with dimension i + head_dim / 2, as in Hugging Face checkpoints. The models
take the table's rows of a step, which the kernel that rotates (`minisgl_kernels.norm_rope_store`) reads in each layer.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from minisgl_batch.layers.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """The table for positions [0, context_len), shared by all layers of a model.

    Attributes:
        table: (context_len, 2, head_dim), computed in float32 and rounded to the model's dtype: each position's
            cosines of head_dim / 2 angles, twice, and their sines, first negated and then as they are.
    """

    table: torch.Tensor

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        context_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        positions = torch.arange(context_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(config, head_dim, device))
        cos, sin = ((f * config.attention_factor).to(dtype) for f in (angles.cos(), angles.sin()))
        table = torch.cat((cos, cos, -sin, sin), dim=-1).view(-1, 2, head_dim)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) int32 -> (num_tokens, 2, head_dim), these tokens' rows."""
        return self.table[positions]


def inverse_frequencies(config: RopeConfig, head_dim: int, device: torch.device | None = None) -> torch.Tensor:
    """Angle per position of each pair of dimensions: (head_dim / 2,) float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.type == "linear":
        return plain / config.factor
    if config.type == "llama3":
        return _llama3(config, plain)
    if config.type == "yarn":
        return _yarn(config, plain, head_dim)
    return plain


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Stretch by how many turns of each wavelength the original context held (Llama 3.1's release)."""
    turns = config.original_context_len * plain / (2 * math.pi)
    width = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / width).clamp(0.0, 1.0)
    return _blend(plain, config.factor, keep)


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Stretch by dimension, linearly between two bounds (https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """Where the original context holds so many turns."""
        wavelengths = config.original_context_len / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device=plain.device) - low) / width
    return _blend(plain, config.factor, 1.0 - ramp.clamp(0.0, 1.0))


def _blend(plain: torch.Tensor, factor: float, keep: torch.Tensor) -> torch.Tensor:
    """`keep` 1 leaves a frequency alone, 0 divides it by `factor`."""
    return plain / factor * (1.0 - keep) + plain * keep
