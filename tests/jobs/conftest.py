"""Fixtures of the job tests."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture
def rng() -> random.Random:
    """Fresh randomness; a failing test shows its seed, and MINISGL_TEST_SEED repeats it."""
    seed = int(os.environ.get("MINISGL_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"MINISGL_TEST_SEED={seed}")  # noqa: T201 (pytest shows it when the test fails)
    return random.Random(seed)
