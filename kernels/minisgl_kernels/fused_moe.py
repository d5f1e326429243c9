"""The experts of a mixture, each applied to the tokens that its router sends there."""

from __future__ import annotations

import torch

from minisgl_kernels import reference_moe


def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over each token's best experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        x: (num_tokens, hidden_size), contiguous; float32, float16 or bfloat16.
        router_logits: (num_tokens, num_experts), any float dtype. Weights are their softmax over all experts.
        gate_up: (num_experts, 2 * width, hidden_size), contiguous, x's dtype. Row 2 * i is the gate's i-th, row
            2 * i + 1 the up projection's.
        down: (num_experts, hidden_size, width), likewise.
        top_k: how many experts a token goes through.
        renormalize: scale each token's weights to a sum of 1.
        out: where to put the result.

    Returns:
        `out`, or a new tensor: x's shape and dtype.
    """
    result = reference_moe.fused_moe(x, router_logits, gate_up, down, top_k, renormalize=renormalize)
    return result if out is None else out.copy_(result)
