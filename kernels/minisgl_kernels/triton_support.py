"""Triton where it is installed, and the question whether a kernel can run.

Without Triton the kernels' modules can still be imported, and everything runs as its twin. Imported by every module
with a Triton kernel.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    if torch.version.cuda is None and "TRITON_INTERPRET" not in os.environ:
        raise ImportError("no kernel can run here, and importing Triton would take 0.1 s and 60 MB")
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError as error:
    if torch.version.cuda is not None:
        logging.getLogger(__name__).warning("no Triton, so GPU kernels run as plain torch, which is slower: %s", error)
    triton = tl = gdc_launch_dependents = gdc_wait = None

__all__ = [
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "jit_for_any",
    "next_power_of_2",
    "runs_kernels",
    "tl",
    "triton",
    "uses_pdl",
]


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton to compile it."""
    return function if triton is None else triton.jit(function)


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` of a function that is compiled once for all values of these arguments, and not again for 1 or 16."""
    return lambda function: function if triton is None else triton.jit(function, do_not_specialize=names)


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether a kernel can run where `x` is; the twin does elsewhere."""
    return x.is_cuda and triton is not None


def uses_pdl(x: torch.Tensor) -> bool:
    """Whether kernels on `x`'s device start before the one ahead of them ends (programmatic dependent launch).

    Such a kernel may touch nothing but weights before `gdc_wait`: what it waits for may itself still be waiting.
    """
    return x.is_cuda and _capability(x.device) >= (9, 0)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that isn't less than `n`."""
    return 1 << (n - 1).bit_length()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
