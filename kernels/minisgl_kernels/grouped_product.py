"""The experts' matrix product for many rows each, on a Hopper GPU: CUDA C++, see `csrc/grouped_product.cu`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch

from minisgl_kernels import cuda
from minisgl_kernels.moe_routing import Routing

UNIT, UNITS = 8, 40  # how the routing cuts an expert's rows for it

logger = logging.getLogger(__name__)


def can_run(x: torch.Tensor, *sizes: int) -> bool:
    """Whether the kernel runs for x, on x's GPU, with weights of these sizes."""
    whole_vectors = all(size % 8 == 0 for size in sizes)
    return x.dtype in (torch.bfloat16, torch.float16) and whole_vectors and _load(x.device) is not None


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    routing: Routing,
    activation: tuple[float, float] | None,
    *,
    is_first: bool,
) -> None:
    """out = x @ weight[expert].T + bias[expert], row by row.

    Args:
        x: (num_tokens, size_k), whose rows are gathered, if `is_first`; else (num_rows, size_k), in the order of `out`.
        weight: (num_experts, size_n, size_k), contiguous, x's dtype.
        bias: (num_experts, size_n), likewise.
        out: (num_rows, size_n); or (num_rows, size_n / 2) if `is_first`: pairs of columns are activated.
        routing: cut by `UNIT` and `UNITS`.
        activation: see `fused_moe.ClampedSwiglu`; None: silu(gate) * up.
        is_first: of the two products.
    """
    run = _load(x.device)
    assert run is not None
    run(
        x,
        weight,
        weight if bias is None else bias,
        out,
        routing.members,
        routing.blocks,
        routing.num_blocks,
        is_first,
        bias is not None,
        *(activation or (0.0, 0.0)),
    )


@cache
def _load(device: torch.device) -> Callable[..., None] | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        module = import_module("tvm_ffi").load_module(build())
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("the experts' CUDA C++ kernel can't be built and Triton's runs, which is slower: %s", error)
        return None
    run: Callable[..., None] = module["grouped_product"]
    return run


def build() -> str:
    """Compile the kernel, or find it compiled; returns the library's path. See `cuda.build`."""
    return cuda.build_library("grouped_product", ("grouped_product",))
