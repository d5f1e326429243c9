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
from minisgl_batch.structured_outputs import StructuredOutputsParams
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


def test_choices_in_cells(tmp_path: Path) -> None:
    write(tmp_path / "lists.parquet", pa.Table.from_pylist([{"prompt": "a", "choices": ["yes", "no"]}]))
    write(tmp_path / "texts.parquet", pa.Table.from_pylist([{"prompt": "b", "choices": '["yes", "no"]'}]))
    (tmp_path / "cells.csv").write_text('prompt,choices\nc,"[""yes"", ""no""]"\nd,\n')
    seen = {}
    for name in ("lists.parquet", "texts.parquet", "cells.csv"):
        with prepare(tmp_path / name, model="m", output=tmp_path / "o") as submission:
            seen |= {row.prompt: row.params.choices for row in submission.examples}
            assert submission.spec.optional_columns == {"choices"}
    assert seen == {"a": ("yes", "no"), "b": ("yes", "no"), "c": ("yes", "no"), "d": None}


def test_structured_outputs_in_cells(tmp_path: Path) -> None:
    given, asked = '{"json": {"const": null}}', '{"type": "json_schema", "json_schema": {"schema": {"const": null}}}'
    table = [{"prompt": "a", "structured_outputs": given}, {"prompt": "b", "response_format": asked}]
    write(tmp_path / "texts.parquet", pa.Table.from_pylist([{"response_format": None} | table[0], table[1]]))
    cell = given.replace('"', '""')
    (tmp_path / "cells.csv").write_text(f'prompt,structured_outputs\nc,"{cell}"\nd,\n')
    seen = {}
    for name in ("texts.parquet", "cells.csv"):
        with prepare(tmp_path / name, model="m", output=tmp_path / "o") as submission:
            seen |= {row.prompt: row.params.structured_outputs for row in submission.examples}
    same = StructuredOutputsParams(json={"const": None})
    assert seen == {"a": same, "b": same, "c": same, "d": None}


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


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_is_called_almost_as_a_setting_is_refused(tmp_path: Path, kind: str) -> None:
    source = tmp_path / f"in.{kind}"
    if kind == "csv":
        source.write_text("prompt,max_token\na,5\n")
    else:
        write(source, pa.table({"prompt": ["a"], "max_token": [5]}))
    said = rf"in.{kind}: column 'max_token' isn't a known field; did you mean max_tokens\? .*`keep_columns` max_token$"
    with pytest.raises(InvalidInputError, match=said):
        prepare(source, model="m", output=tmp_path / "o")
    for read in (ReadOptions(keep_columns=("max_token",)), ReadOptions(prompt_column="prompt", settings=False)):
        with prepare(source, model="m", output=tmp_path / "o", read=read) as submission:
            assert submission.examples[0].params.to_dict() == {}


def test_a_mistyped_column_of_prompts_is_named(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("promt,n\na,5\n")
    with pytest.raises(InvalidInputError, match=r"did you mean `prompt_column` promt\?$"):
        prepare(source, model="m", output=tmp_path / "o")


def test_cells_as_pandas_writes_them(tmp_path: Path) -> None:
    """A column with nulls holds floats, and flags are Python's words."""
    source = tmp_path / "in.csv"
    source.write_text(
        "prompt,logprobs,top_logprobs,ignore_eos,max_completion_tokens,stop\na,True,3.0,False,16.0,True\n"
    )
    with prepare(source, model="m", output=tmp_path / "o") as submission:
        params = submission.examples[0].params
    assert params.to_dict() == {"logprobs": 3, "ignore_eos": False, "max_tokens": 16, "stop": "True"}
