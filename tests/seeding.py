"""Random inputs of tests that use torch or numpy: fresh each time, and repeatable."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds all generators anew for each test. A failed test shows its seed; MINISGL_TEST_SEED repeats it."""
    value = int(os.environ.get("MINISGL_TEST_SEED", random.SystemRandom().getrandbits(31)))
    print(f"MINISGL_TEST_SEED={value}")  # noqa: T201 - pytest shows it with a failure
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value
