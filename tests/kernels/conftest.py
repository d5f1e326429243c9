"""Fixtures of the kernels' tests: random inputs, and where the kernels run."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.devices import interpreter
from tests.seeding import seed

__all__ = ["seed"]


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton kernels run. Tests take sizes of real models on a GPU, and a few tokens in the interpreter."""
    return torch.device("cuda") if request.param == "gpu" else interpreter(monkeypatch)
