"""Where the kernels run in tests: compiled on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch

from minisgl_kernels import triton_support
from tests.kernels.interpreter import mend


def interpreter(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU, whose tensors go to Triton's kernels from here on."""
    if triton_support.triton is None or torch.cuda.is_available():
        pytest.skip("needs Triton, and that it isn't compiled for a GPU")
    mend(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_support, "runs_kernels", lambda _: True)
    return torch.device("cpu")
