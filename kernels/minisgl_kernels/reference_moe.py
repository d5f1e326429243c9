"""The plain twins of the kernels of a mixture of experts: see `reference.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from minisgl_kernels.fixed_order import by_row
from minisgl_kernels.matmul import linear

if TYPE_CHECKING:
    from minisgl_kernels.fused_moe import ClampedSwiglu


def route(router_logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's best experts, by the softmax of its router's logits; of equal ones those with lower ids.

    Args:
        router_logits: (num_tokens, num_experts), any float dtype.
        top_k: how many experts a token goes through.
        renormalize: scale each token's weights to a sum of 1.

    Returns:
        (num_tokens, top_k) int64 ids, best first, and float32 weights.
    """
    probs, ids = router_logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights = probs[:, :top_k]
    return ids[:, :top_k], weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights


def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """The twin of `minisgl_kernels.fused_moe`, expert by expert. Reads counts back, so no CUDA graph can hold it."""
    ids, weights = route(router_logits, top_k, renormalize=renormalize)
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(down)).tolist()
    activate = partial(_activate, activation)
    outs = torch.empty((ids.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            bias, out_bias = (None if b is None else b[expert] for b in (gate_up_bias, down_bias))
            activated = by_row(activate, linear(x[pairs // top_k], gate_up[expert], bias))
            outs[pairs] = linear(activated, down[expert], out_bias)
    return torch.einsum("tkh,tk->th", outs.view(-1, top_k, x.shape[1]).float(), weights).to(x.dtype)


def _activate(activation: ClampedSwiglu | None, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.unflatten(1, (-1, 2)).unbind(2)
    if activation is None:
        return F.silu(gate).mul_(up)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    activated: torch.Tensor = gate * torch.sigmoid(activation.alpha * gate) * (up + 1.0)
    return activated
