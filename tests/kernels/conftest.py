"""Fixtures of the kernels' tests: random inputs, and where the kernels run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_kernels import cuda
from tests.kernels.devices import interpreter
from tests.kernels.emulation import emulate
from tests.seeding import seed

__all__ = ["seed"]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of chosen algorithms, in a cache folder of the test's own."""
    monkeypatch.setattr("minisgl_kernels.cpp.cache_dir", lambda: tmp_path)
    return tmp_path / "matmul.json"


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton kernels run. Tests take sizes of real models on a GPU, and a few tokens in the interpreter."""
    return torch.device("cuda") if request.param == "gpu" else interpreter(monkeypatch)


@pytest.fixture(
    params=[
        "interpreter",
        "emulator",
        pytest.param("Triton", marks=pytest.mark.gpu),
        pytest.param("C++", marks=pytest.mark.gpu),
    ]
)
def layer_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the layer kernels run: CUDA C++ too, where it can be compiled."""
    if request.param in ("interpreter", "emulator"):
        cpu = interpreter(monkeypatch)
        if request.param == "emulator":  # in Triton's place, for what the CUDA C++ kernels can run
            emulate(monkeypatch)
        return cpu
    if request.param == "Triton":
        monkeypatch.setattr(cuda, "layer_kernels", lambda _: None)
    elif cuda.layer_kernels(torch.empty(0, dtype=torch.bfloat16, device="cuda")) is None:
        pytest.skip("needs a Hopper GPU, nvcc, ninja and tvm-ffi")
    return torch.device("cuda")
