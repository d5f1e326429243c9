"""What Triton 3.6's interpreter lacks for running our kernels on a CPU as a GPU would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

Array = np.ndarray[Any, Any]


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    truncate, dot, patch_tensor = (
        interpreter._convert_float,
        interpreter.InterpreterBuilder.create_dot,
        interpreter._patch_lang_tensor,
    )

    def convert(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        """It truncates float32 to bfloat16; a GPU rounds."""
        if (str(source), str(target)) != ("fp32", "bf16"):
            return truncate(data, source, target, rounding)  # type: ignore[no-any-return]
        return torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        """It multiplies the bits of bfloat16 numbers."""
        return dot(self, *(_widened(x) if str(x.dtype) == "bf16" else x for x in (a, b)), *args)

    def _widened(handle: Any) -> Any:
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def patch(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 makes no integer of an array with one value, as which a loop gets its bounds."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
