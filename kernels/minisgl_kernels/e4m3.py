"""Keys and values as 8-bit floats (e4m3: four bits of exponent, three of mantissa), and what stands for what.

A number is stored as the nearest multiple of a scale that e4m3 holds, at most 448 scales large. Whoever reads the pool
gets multiples: factors on the scores and on the output make up for the scales.
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_CAPABILITY = (8, 9)  # of GPUs that convert and multiply such numbers: Ada, Hopper and newer ones
UNSCALED = (1.0, 1.0)


def to_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x as multiples of a scale, the largest ones for what lies beyond them; NaN stays NaN."""
    return (x.float() * (1.0 / scale)).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
