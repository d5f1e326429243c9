"""docs/models.md says what is checked, and everything is."""

from __future__ import annotations

import pytest

from minisgl_batch.models.families import SUPPORTED_ARCHITECTURES
from tests.minisgl_batch.models.table import family_of, has_plain_case, is_split


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_architecture_is_compared_alone_and_split(architecture: str) -> None:
    family = family_of(architecture)
    assert has_plain_case(family)
    assert is_split(family)
