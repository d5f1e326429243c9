"""Tables of documents say what the code has."""

from __future__ import annotations

import pytest

from tests.tables import ROOT, TABLES, in_document


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_up_to_date(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert in_document(text, TABLES[name]) == text, "make them again with `python -m tests.tables`"
