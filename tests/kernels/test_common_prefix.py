"""The radix tree's comparison, in C++ and in numpy, against lists."""

from __future__ import annotations

import logging
import random
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_kernels import common_prefix, cpp, reference

int32_lists = st.lists(st.integers(-5, 5), max_size=12)
implementations = pytest.mark.parametrize(
    "compare", [common_prefix.common_prefix_len, reference.common_prefix_len], ids=["C++", "numpy"]
)


@implementations
@given(a=int32_lists, b=int32_lists)
def test_common_prefix_is_that_of_the_lists(compare: common_prefix._Compare, a: list[int], b: list[int]) -> None:
    want = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert compare(np.array(a, np.int32), np.array(b, np.int32)) == want


@implementations
def test_long_prefixes_end_where_they_differ(compare: common_prefix._Compare) -> None:
    for _ in range(50):
        a = np.random.randint(-(2**31), 2**31, random.randrange(1, 1000), dtype=np.int32)
        b = np.concatenate((np.zeros(3, np.int32), a, a))[3:]  # a slice of something longer
        assert compare(a, b) == compare(b, a) == len(a)
        where = random.randrange(len(a))
        b[where] ^= 1 << random.randrange(31)
        assert compare(a, b) == where


@pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="needs g++ and Python's headers",
)
def test_the_kernel_can_be_built() -> None:
    assert cpp.load_module("common_prefix") is not None


def test_strided_arrays_are_refused() -> None:
    """Their memory isn't what they hold."""
    with pytest.raises(ValueError, match="contiguous"):
        common_prefix.common_prefix_len(np.zeros(8, np.int32)[::2], np.zeros(4, np.int32))


def test_without_a_compiler_numpy_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setattr(cpp, "load_module", cpp.load_module.__wrapped__)
    with caplog.at_level(logging.INFO):
        assert common_prefix._compare.__wrapped__() is reference.common_prefix_len
    assert "slower" in caplog.text
