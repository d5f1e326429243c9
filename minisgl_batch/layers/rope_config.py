"""The parameters of rotary position embeddings. Knows nothing of torch or of config files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions become rotation angles.

    Attributes:
        theta: base of the geometric series of wavelengths.
        fraction: the part of each head that is rotated, its first dimensions.
        type: "linear" stretches all positions by `factor`; "llama3" stretches long wavelengths only; "yarn" blends
            from stretched to unstretched over the wavelengths and scales the attention; "longrope" stretches each
            wavelength by a factor of its own.
        factor: how many times the context is longer than the one of pre-training.
        original_context_len: tokens of the pre-training context (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: the context holds fewer than the one many turns of a wavelength: stretched;
            more than the other: left alone; between: blended (llama3).
        beta_fast, beta_slow: the same bounds for yarn, in turns.
        truncate: round yarn's bounds outwards to whole dimensions.
        attention_factor: cosines and sines are multiplied by it (yarn, longrope).
        short_factors, long_factors: of the wavelengths, for sequences that fit into the pre-training context, and for
            longer ones (longrope).
        query_growth: queries are multiplied by 1 + query_growth * log(1 + position // original_context_len).
    """

    theta: float = 10000.0
    fraction: float = 1.0
    type: RopeType = "default"
    factor: float = 1.0
    original_context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_growth: float = 0.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated."""
        return int(head_dim * self.fraction)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The scale that yarn recommends (https://arxiv.org/abs/2309.00071, section 3.4), or DeepSeek's ratio of two."""

    def magnitude(weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(factor) if factor > 1.0 else 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def longrope_attention_factor(factor: float, original_context_len: int) -> float:
    """The scale that longrope recommends (https://arxiv.org/abs/2402.13753)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original_context_len)) if factor > 1.0 else 1.0
