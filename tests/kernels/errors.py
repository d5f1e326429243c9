"""How far a kernel's result is from the truth."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over the norm of `want`; NaN where either has one."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_close(got: torch.Tensor, exact: torch.Tensor, twin: torch.Tensor) -> None:
    """`got` is near the exact result, and hardly farther from it than the twin in the same dtype."""
    assert got.shape == exact.shape
    assert got.dtype == twin.dtype
    error = relative_error(got, exact)
    assert error < _TOLERANCE[got.dtype]
    # Few numbers round luckily or not; many don't.
    slack = 1.2 if got.numel() > 10_000 else 2.5
    assert error < slack * relative_error(twin, exact) + 3e-6
