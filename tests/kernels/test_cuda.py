"""The CUDA C++ kernels compile where there is no GPU too."""

from __future__ import annotations

import logging
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from minisgl_kernels import cuda, grouped_product


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None or shutil.which("ninja") is None or find_spec("tvm_ffi") is None:
        pytest.skip("needs nvcc, ninja and tvm-ffi")
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr("minisgl_kernels.cpp.cache_dir", lambda: tmp_path)


@pytest.mark.usefixtures("empty_cache")
def test_kernels_can_be_compiled() -> None:
    assert Path(cuda.build()).stat().st_size > 0
    assert Path(cuda.build_library("one_shot", ("one_shot",))).stat().st_size > 0


@pytest.mark.full
@pytest.mark.usefixtures("empty_cache")
def test_the_product_of_clusters_can_be_compiled() -> None:
    assert Path(grouped_product.build()).stat().st_size > 0


def test_without_a_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda, "build", lambda: (_ for _ in ()).throw(RuntimeError("no nvcc")))
    with caplog.at_level(logging.WARNING):
        assert cuda._load.__wrapped__(torch.device("cuda")) is None
    assert "no nvcc" in caplog.text


def test_other_devices_and_types_have_no_kernels() -> None:
    assert cuda.layer_kernels(torch.empty(8, dtype=torch.bfloat16)) is None
    assert cuda.layer_kernels(torch.empty(8)) is None
