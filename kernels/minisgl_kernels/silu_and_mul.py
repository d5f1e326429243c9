"""The gated activations of MLPs in one pass: CUDA C++, Triton, or the twin."""

from __future__ import annotations

import torch

from minisgl_kernels import cuda, reference
from minisgl_kernels import triton_support as support
from minisgl_kernels.triton_support import gdc_launch_dependents, gdc_wait, jit, tl

_BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate and up side by side.

    silu is rounded to the dtype before the product, as in the models' reference code. Moves 3 elements per output.

    Args:
        gate_up: (num_tokens, 2 * width), contiguous; any float dtype.

    Returns:
        (num_tokens, width), the same dtype.
    """
    if not support.runs_kernels(gate_up):
        return reference.silu_and_mul(gate_up)
    return _launch(gate_up, gelu=False)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` with gelu, in its approximation by tanh, in silu's place."""
    if not support.runs_kernels(gate_up):
        return reference.gelu_and_mul(gate_up)
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if not num_tokens:
        return out
    kernels = cuda.layer_kernels(out) if width % 8 == 0 else None
    if kernels is not None:
        kernels.silu_and_mul(gate_up, out, gelu)
        return out
    pdl = support.uses_pdl(out)
    num_blocks = -(-width // _BLOCK)
    _kernel[(num_tokens * num_blocks,)](
        gate_up, out, width=width, block=_BLOCK, num_blocks=num_blocks, gelu=gelu, pdl=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


@jit
def _kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    num_blocks: tl.constexpr,
    gelu: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """One program per row and block of columns, neighbours side by side in memory."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * block + tl.arange(0, block)
    inside = columns < width
    gates = gate_up + row * 2 * width + columns
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    gate, up = tl.load(gates, mask=inside), tl.load(gates + width, mask=inside)
    tl.store(out + row * width + columns, activate(gate, up, gelu), mask=inside)


@jit
def activate(gate: tl.tensor, up: tl.tensor, gelu: tl.constexpr) -> tl.tensor:
    """silu(gate) * up, or with gelu in silu's place, in their dtype, to which the first factor is rounded too."""
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    exponent = gate
    if gelu:  # 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2 * y)), with y = sqrt(2 / pi) * (gate + 0.044715 * gate ** 3)
        exponent = gate * (1.5957691216057308 + 0.07135481282731255 * gate * gate)
    activated = (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(dtype)
