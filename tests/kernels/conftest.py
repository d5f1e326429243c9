"""Fixtures of the kernels' tests: random inputs, and where the kernels run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl_kernels import triton_support
from tests.seeding import seed

__all__ = ["seed"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton kernels run: a GPU, or this CPU in Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_support, "runs_kernels", lambda _: True)
    truncating = interpreter._convert_float

    def convert(data: np.ndarray[Any, Any], source: Any, target: Any, rounding: Any) -> np.ndarray[Any, Any]:
        """The interpreter truncates float32 to bfloat16; a GPU rounds."""
        if (str(source), str(target)) != ("fp32", "bf16"):
            return truncating(data, source, target, rounding)  # type: ignore[no-any-return]
        return torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    return torch.device("cpu")
