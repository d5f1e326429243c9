"""Weights in oneDNN's blocked layout, which its CPU matrix multiplications are several times faster on.

torch's own `F.linear` calls MKL for float32, which reads weights as they lie and is far from the peak of processors
that aren't Intel's. Called by the linear layers when their weights are complete.
"""

from __future__ import annotations

import platform

import torch
from torch import nn

from minisgl_kernels import matmul


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for a weight (out, in) that is packed or not; into `out`, then without a bias."""
    if weight.is_mkldnn and not matmul.keeps_order():
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return packed if out is None else out.copy_(packed)
    return matmul.linear(x, weight, bias, out)


def pack(weight: nn.Parameter) -> nn.Parameter:
    """The weight (out, in) in the layout that is fastest where it is; itself if that is the plain one."""
    if not _packs(weight):
        return weight
    return nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weight), requires_grad=False)


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
