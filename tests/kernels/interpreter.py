"""What Triton 3.6's interpreter lacks for running our kernels on a CPU as a GPU would, and in a test's time."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

Array = np.ndarray[Any, Any]


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    truncate, dot, patch_tensor, reduce_by_one = (
        interpreter._convert_float,
        interpreter.InterpreterBuilder.create_dot,
        interpreter._patch_lang_tensor,
        interpreter.ReduceOps.generic_reduce,
    )

    def convert(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        """It truncates float32 to bfloat16 and e4m3, and knows no NaN there; a GPU rounds."""
        if (str(source), str(target)) == ("fp32", "bf16"):
            return torch.from_numpy(data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (str(source), str(target)) == ("fp32", "fp8e4nv"):
            return torch.from_numpy(data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return truncate(data, source, target, rounding)  # type: ignore[no-any-return]

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

    def reduce(self: Any, values: Any) -> Any:
        """It combines one value after the other, each by a call; a GPU combines halves."""
        parts = [value.handle.data for value in values]
        if self.axis != 0 or len(parts[0]) < 2 or self.keep_dims:
            return reduce_by_one(self, values)
        while (size := len(parts[0])) > 1:
            half = size // 2  # sizes are powers of two
            halves = [part[side] for side in (slice(half), slice(half, None)) for part in parts]
            kinds = [value.dtype for value in values] * 2
            combined = self.combine_fn.fn(*(self.to_tensor(*pair) for pair in zip(halves, kinds, strict=True)))
            parts = [part.handle.data for part in (combined if isinstance(combined, tuple) else (combined,))]
        return [self.to_tensor(part[0], value.dtype) for part, value in zip(parts, values, strict=True)]

    array_type = interpreter._get_np_dtype
    array_types = cache(array_type)  # it makes a table of all types at each look

    def array_type_of(kind: Any) -> Any:
        return array_type(kind) if kind.scalar.is_ptr() else array_types(kind.scalar)

    monkeypatch.setattr(interpreter, "_get_np_dtype", array_type_of)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
    monkeypatch.setattr(interpreter, "_patch_lang", _Language(interpreter).patch)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


class _Language:
    """The language's modules, patched once a launch: the interpreter does it again for each call of a function, which
    takes most of its time, and doesn't undo that.
    """

    def __init__(self, interpreter: Any) -> None:
        self._patch = interpreter._patch_lang
        self._modules = (interpreter.tl, interpreter.tl.core)
        self._names: dict[Any, set[str]] = {}  # function -> modules that it knows
        self._scopes: list[Any] = []
        self._patched: set[str] = set()

    def patch(self, function: Any) -> _Language:
        """Called for a kernel at its launch, which restores at its end, and for each function that it calls."""
        names = self._names.get(function)
        if names is None:
            there = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
            names = self._names[function] = {module.__name__ for module in self._modules if module in there}
        if not names <= self._patched:
            self._scopes.append(self._patch(function))
            self._patched |= names
        return self

    def restore(self) -> None:
        while self._scopes:
            self._scopes.pop().restore()
        self._patched.clear()
