"""Gumbel noise inside Triton kernels, equal to that of `reference.gumbel_noise`, and what it is keyed by.

Imported by the sampling kernels. Knows no logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minisgl_kernels.triton_support import jit, tl


class SamplingRows(NamedTuple):
    """The rows that a step samples, and every slot's sampling values.

    Attributes:
        slots: (num_rows,) int32; each row's line of the values below.
        kv_lens: (num_rows,) int32; tokens before the one to sample.
        num_prompt: (num_slots,) int64; how many of them are prompt. `kv_lens - num_prompt` is the output position.
        seeds, sample_indices: (num_slots,) int64; with the output position, what a row's noise depends on.
        temperature: (num_slots,) float32; 0 is greedy.
        top_k: (num_slots,) int32; 0 keeps all.
        top_p, min_p: (num_slots,) float32; 1 and 0 keep all.
    """

    slots: torch.Tensor
    kv_lens: torch.Tensor
    num_prompt: torch.Tensor
    seeds: torch.Tensor
    sample_indices: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@jit
def row_key(seed: tl.tensor, sample_index: tl.tensor, position: tl.tensor) -> Any:
    """`reference.noise_keys` of one row, split into (multiplier, increment): two uint32."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    x = seed.to(tl.uint64, bitcast=True) + sample_index.to(tl.uint64, bitcast=True) * golden
    x = mix64(x) + position.to(tl.uint64, bitcast=True) * golden
    x = mix64(x)
    return (x >> 32).to(tl.uint32) | 1, x.to(tl.uint32)


@jit
def mix64(x: tl.tensor) -> Any:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def noise_bits(x: tl.tensor) -> tl.tensor:
    """23 random bits for each x = id * multiplier + increment; both uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x >> 9


@jit
def noise(bits: tl.tensor) -> Any:
    """`reference.gumbel_noise` of `noise_bits`. Costs two exact logarithms."""
    rate = -tl.log(1.0 - (bits.to(tl.float32) + 0.5) * 2.0**-23)
    return -tl.log(rate)


@jit
def log2_floor(bits: tl.tensor) -> Any:
    """At most log2 of the uniform number that `noise` makes of these bits, as (log2 + 127) * 2**23 in float32.

    A float's bit pattern, read as an integer, is its logarithm with straight pieces between the powers of two: at most
    0.09 below.
    """
    u = (bits | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return u.to(tl.int32, bitcast=True).to(tl.float32)
