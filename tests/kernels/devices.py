"""Where the kernels run in tests: compiled on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl_kernels import triton_support


def interpreter(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU, whose tensors go to Triton's kernels from here on."""
    if triton_support.triton is None or torch.cuda.is_available():
        pytest.skip("needs Triton, and that it isn't compiled for a GPU")
    from triton.runtime import interpreter

    truncating = interpreter._convert_float

    def convert(data: np.ndarray[Any, Any], source: Any, target: Any, rounding: Any) -> np.ndarray[Any, Any]:
        """The interpreter truncates float32 to bfloat16; a GPU rounds."""
        if (str(source), str(target)) != ("fp32", "bf16"):
            return truncating(data, source, target, rounding)  # type: ignore[no-any-return]
        return torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_support, "runs_kernels", lambda _: True)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    return torch.device("cpu")
