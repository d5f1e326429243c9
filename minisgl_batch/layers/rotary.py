"""Rotary position embeddings: a table of cosines and sines per model.

Dimension i of a head is rotated together with dimension i + head_dim / 2, as in Hugging Face checkpoints. The models
take the table's rows of a step, which the kernel that rotates (`minisgl_kernels.norm_rope_store`) reads in each layer.

Where a checkpoint rotates only a head's first dimensions, i goes with i + rotary_dim / 2 there. The rows of query and
key projections are reordered then when they are loaded, alike, which no attention score notices: `rotary_order`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from minisgl_batch.layers.rope_config import RopeConfig


class Rotation(NamedTuple):
    """What attention does to the queries and keys of a step's tokens.

    Attributes:
        rope: (num_tokens, 2, head_dim), rows of `RotaryEmbedding.table`.
        query_scale: (num_tokens, 1, 1), a factor on queries; None: there is none.
    """

    rope: torch.Tensor
    query_scale: torch.Tensor | None


class RotaryEmbedding(nn.Module):
    """The table for positions [0, context_len), shared by all layers of a model.

    Longrope has one set of factors for all of it: the long ones if it is longer than the pre-training context. So a
    prefix has the same keys in every sequence.

    Attributes:
        table: (context_len, 2, head_dim), computed in float32 and rounded to the model's dtype: each position's
            cosines of head_dim / 2 angles, twice, and their sines, first negated and then as they are.
        query_scales: (context_len, 1, 1), likewise; None where all are 1.
    """

    table: torch.Tensor
    query_scales: torch.Tensor | None

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
        rotary_dim = config.rotary_dim(head_dim)
        angles = torch.outer(positions, inverse_frequencies(config, rotary_dim, context_len, device))
        cos, sin = ((f * config.attention_factor).to(dtype) for f in (angles.cos(), angles.sin()))
        num_at_rest = (head_dim - rotary_dim) // 2
        cos, sin = F.pad(cos, (0, num_at_rest), value=1.0), F.pad(sin, (0, num_at_rest))
        table = torch.cat((cos, cos, -sin, sin), dim=-1).view(-1, 2, head_dim)
        self.register_buffer("table", table, persistent=False)
        query_scales = None
        if config.query_growth and context_len > config.original_context_len:
            growth = torch.log(1.0 + torch.floor(positions / config.original_context_len))
            query_scales = (1.0 + config.query_growth * growth).to(dtype).view(-1, 1, 1)
        self.register_buffer("query_scales", query_scales, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """What these tokens need; (num_tokens,) int32."""
        return Rotation(self.table[positions], None if self.query_scales is None else self.query_scales[positions])


def rotary_order(rotary_dim: int, head_dim: int) -> torch.Tensor:
    """Which dimension of a checkpoint's head, (head_dim,) int64, goes to each place of ours.

    rotary_dim / 2 of either half are rotated, and come first in it.
    """
    rotated, at_rest = torch.arange(head_dim).split((rotary_dim, head_dim - rotary_dim))
    (first, second), (third, fourth) = rotated.chunk(2), at_rest.view(2, -1)
    return torch.cat((first, third, second, fourth))


def inverse_frequencies(
    config: RopeConfig, rotary_dim: int, context_len: int, device: torch.device | None = None
) -> torch.Tensor:
    """Angle per position of each pair of dimensions: (rotary_dim / 2,) float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    plain = 1.0 / config.theta**exponents
    if config.type == "linear":
        return plain / config.factor
    if config.type == "llama3":
        return _llama3(config, plain)
    if config.type == "yarn":
        return _yarn(config, plain, rotary_dim)
    if config.type == "longrope":
        factors = config.long_factors if context_len > config.original_context_len else config.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32, device=device)
    return plain


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Stretch by how many turns of each wavelength the original context held (Llama 3.1's release)."""
    turns = config.original_context_len * plain / (2 * math.pi)
    width = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / width).clamp(0.0, 1.0)
    return _blend(plain, config.factor, keep)


def _yarn(config: RopeConfig, plain: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Stretch by dimension, linearly between two bounds (https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """Where the original context holds so many turns."""
        wavelengths = config.original_context_len / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = (high - low) or 0.001
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device=plain.device) - low) / width
    return _blend(plain, config.factor, 1.0 - ramp.clamp(0.0, 1.0))


def _blend(plain: torch.Tensor, factor: float, keep: torch.Tensor) -> torch.Tensor:
    """`keep` 1 leaves a frequency alone, 0 divides it by `factor`."""
    return plain / factor * (1.0 - keep) + plain * keep
