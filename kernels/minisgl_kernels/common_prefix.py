"""The comparison that the radix tree walks by: C++, or numpy where it can't be built."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from minisgl_kernels import cpp, reference

_Compare = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], int]


def common_prefix_len(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many leading ids two sequences, contiguous arrays of int32, have in common."""
    return _compare()(a, b)


@cache
def _compare() -> _Compare:
    module = cpp.load_module("common_prefix")
    compare: _Compare = reference.common_prefix_len if module is None else module.common_prefix_len
    return compare
