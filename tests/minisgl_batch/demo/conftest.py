from __future__ import annotations

import random

import pytest


@pytest.fixture(params=[random.SystemRandom().randrange(1 << 30)], ids=lambda seed: f"seed={seed}")
def seed(request: pytest.FixtureRequest) -> int:
    """A new seed in each run; it stands in the test's name, so that a failure can be repeated."""
    return int(request.param)
