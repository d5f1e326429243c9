"""docs/models.md says what is checked, and everything is."""

from __future__ import annotations

import pytest

from minisgl_batch.models.families import SUPPORTED_ARCHITECTURES
from tests.minisgl_batch.models.table import DOCUMENT, MODELS, family_of, has_plain_case, in_document, is_split, table


def test_the_table_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert table() in text, "make it again with `python -m tests.minisgl_batch.models.table`"
    assert in_document(text) == text


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_architecture_is_compared_alone_and_split(architecture: str) -> None:
    assert architecture in MODELS
    family = family_of(architecture)
    assert has_plain_case(family)
    assert is_split(family)
