"""Types and names of a table's columns: what can be used is, and what can't is refused by name."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minisgl_batch.errors import InvalidInputError
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.submission import prepare


def write(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path)
    return path


def test_decimals_as_settings(tmp_path: Path) -> None:
    row = {"prompt": "a", "temperature": Decimal("0.70"), "seed": Decimal(2**62 + 1), "n": Decimal("2.0")}
    source = write(tmp_path / "in.parquet", pa.Table.from_pylist([row, {"prompt": "b"}]))
    with prepare(source, model="m", output=tmp_path / "o") as submission:
        exact, empty = submission.examples
    assert exact.params.to_dict() == {"temperature": 0.7, "seed": 2**62 + 1, "n": 2}
    assert empty.params.to_dict() == {}


def test_biases_and_words_in_cells(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "logit_bias": {"5": 1.5}, "bad_words": ["x", "y"]},
        {"prompt": "b", "logit_bias": {"7": -2.0}, "bad_words": None},
    ]
    texts = [
        {"prompt": "c", "logit_bias": '{"5": 1.5}', "bad_words": '["x", "y"]'},
        {"prompt": "d", "bad_words": "x y"},
    ]
    write(tmp_path / "structs.parquet", pa.Table.from_pylist(rows))
    write(tmp_path / "texts.parquet", pa.Table.from_pylist(texts))
    (tmp_path / "cells.csv").write_text('prompt,logit_bias,bad_words\ne,"{""5"": 1.5}","[""x"", ""y""]"\nf,,x y\n')
    seen = {}
    for name in ("structs.parquet", "texts.parquet", "cells.csv"):
        with prepare(tmp_path / name, model="m", output=tmp_path / "o") as submission:
            seen |= {row.prompt: row.params.to_dict() for row in submission.examples}
    full = {"logit_bias": {5: 1.5}, "bad_words": ("x", "y")}
    word = {"bad_words": "x y"}
    assert seen == {"a": full, "b": {"logit_bias": {7: -2.0}}, "c": full, "d": word, "e": full, "f": word}


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"], [1], [2]], names=["prompt", "prompt", "x", "x"])
    source = write(tmp_path / "in.parquet", table)
    with pytest.raises(InvalidInputError, match=r"in.parquet has 2 columns called 'prompt': rename all but one$"):
        prepare(source, model="m", output=tmp_path / "o")
    write(source, table.select([0, 2, 3]))
    prepare(source, model="m", output=tmp_path / "o").close()
    with pytest.raises(InvalidInputError, match="has 2 columns called 'x'"):
        prepare(source, model="m", output=tmp_path / "o", read=ReadOptions(keep_columns=("x",)))


@pytest.mark.parametrize("value", [b"\xff", [b"\xff"], {"x": [datetime.date(2026, 1, 2)]}, [Decimal("1.5")]])
def test_a_column_that_is_no_text(tmp_path: Path, value: Any) -> None:
    source = write(tmp_path / "in.parquet", pa.Table.from_pylist([{"q": "a", "b": value, "metadata": value}]))
    read = ReadOptions(template="{q} {b}", settings=False)
    with pytest.raises(InvalidInputError, match=r"in.parquet: column 'b' is of type .*: convert it to text"):
        prepare(source, model="m", output=tmp_path / "o", read=read)
    with pytest.raises(InvalidInputError, match="column 'metadata' is of type"):
        prepare(source, model="m", output=tmp_path / "o", read=ReadOptions(prompt_column="q"))
    read = ReadOptions(prompt_column="q", settings=False, keep_columns=("b",))
    prepare(source, model="m", output=tmp_path / "o", read=read).close()


def test_a_struct_that_has_a_field_twice(tmp_path: Path) -> None:
    numbers = pa.array([0.5])
    bias = pa.StructArray.from_arrays([numbers, numbers], names=["5", "5"])
    source = write(tmp_path / "in.parquet", pa.table({"prompt": ["a"], "logit_bias": bias}))
    with pytest.raises(InvalidInputError, match=r"in.parquet: column 'logit_bias' is of type .*: convert it to text"):
        prepare(source, model="m", output=tmp_path / "o")
