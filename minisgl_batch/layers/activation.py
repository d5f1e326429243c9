"""The gated activation of MLPs. Used by the models."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for gate and up side by side: (num_tokens, 2 * size) -> (num_tokens, size)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
