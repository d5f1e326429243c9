"""Fixtures of the kernels' tests: random inputs, and where the kernels run."""

from __future__ import annotations

import pytest
import torch

from minisgl_kernels import triton_support
from tests.kernels import interpreter
from tests.seeding import seed

__all__ = ["seed"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton kernels run: a GPU, or this CPU in Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.importorskip("triton")
    interpreter.mend(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_support, "runs_kernels", lambda _: True)
    return torch.device("cpu")
