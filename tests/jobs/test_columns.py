"""What columns and fields of inputs are: prompts, messages, settings, and columns that are kept."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minisgl_batch.errors import InvalidInputError, InvalidParameterError
from minisgl_jobs.model import Row
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.submission import prepare
from tests.jobs.input_files import (
    FORMATS,
    all_rows,
    make_rows,
    read_chunks,
    write_csv,
    write_jsonl,
    write_parquet,
)


def test_types_of_kept_columns(tmp_path: Path) -> None:
    """Of Parquet as they are; of JSON, whatever holds all values."""
    day = datetime.date(2026, 11, 30)
    rows = [{"id": 1, "prompt": "a", "day": day, "cost": Decimal("1.50"), "tags": ["x"], "kind": "k"}] * 3
    table = pa.Table.from_pylist(rows)
    table = table.set_column(5, "kind", table["kind"].dictionary_encode())
    pq.write_table(table, tmp_path / "in.parquet")
    read = ReadOptions(keep_columns=("day", "cost", "tags", "kind", "id"))
    with prepare(tmp_path / "in.parquet", model="m", output=tmp_path / "o", read=read) as submission:
        kept = read_chunks(submission)[0].kept
    assert kept is not None
    assert kept.schema.types == [pa.date32(), pa.decimal128(3, 2), pa.list_(pa.string()), pa.string(), pa.int64()]
    assert kept.to_pylist()[0] == {name: rows[0][name] for name in kept.column_names}

    texts = {
        "s": ["x", "y"],
        "o": [{"a": 1}, "z"],
        "m": [1, "1"],
        "d": [[[1]], [[2]]],
        "w": [[1], ["x"]],
        "v": [[1], 1],
        "p": [2**53 + 1, 0.5],
        "q": [[2**53 + 1], [0.5]],
        "n": [None, None],
    }
    lists = {"t": [["x"], []], "u": [[1, None], [2]], "g": [[1, 2.5], None], "e": [[], [None]]}
    values = {"i": [1, 2], "f": [1, 2.5], "b": [True, None], **texts, **lists}
    lines = [{"prompt": "a", **{name: both[i] for name, both in values.items()}} for i in range(2)]
    read = ReadOptions(keep_columns=tuple(values))
    with prepare(write_jsonl(tmp_path / "in.jsonl", lines), model="m", output=tmp_path / "o", read=read) as submission:
        kept = read_chunks(submission)[0].kept
    assert kept is not None
    text = pa.string()
    kinds = [pa.list_(kind) for kind in (text, pa.int64(), pa.float64(), text)]
    assert kept.schema.types == [pa.int64(), pa.float64(), pa.bool_(), *[text] * len(texts), *kinds]
    as_json = {"d": ["[[1]]", "[[2]]"], "w": ["[1]", '["x"]'], "v": ["[1]", "1"]}
    as_json |= {"p": ["9007199254740993", "0.5"], "q": ["[9007199254740993]", "[0.5]"]}
    assert kept.to_pydict() == {**values, "o": ['{"a": 1}', "z"], "m": ["1", "1"], **as_json}


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "", "-20"], [1, None, -20]),
        (["1", "2.5", ""], [1.0, 2.5, None]),
        (["1e3", "0", "-0.5E-1"], [1000.0, 0.0, -0.05]),
        (["True", "false", ""], [True, False, None]),
        (["", "", ""], ["", "", ""]),
        (["007", "8", ""], ["007", "8", ""]),
        (["1.50", "x", ""], ["1.50", "x", ""]),
        (["1", "True", "0x1F"], ["1", "True", "0x1F"]),
        (["9223372036854775807", "1", "2"], [2**63 - 1, 1, 2]),
        (["9223372036854775808", "1", "2"], ["9223372036854775808", "1", "2"]),
        (["9007199254740993", "1", "2"], [2**53 + 1, 1, 2]),
        (["9007199254740992", "1.5", "2"], [2.0**53, 1.5, 2.0]),
        (["9007199254740993", "1.5", "2"], ["9007199254740993", "1.5", "2"]),
        (["1e999", "1.5", "2"], ["1e999", "1.5", "2"]),
        (["9" * 5000, "1", "2"], ["9" * 5000, "1", "2"]),
        (["9" * 350, "1.5", "2"], ["9" * 350, "1.5", "2"]),
        (["NaN", "1.5", "[1]"], ["NaN", "1.5", "[1]"]),
    ],
)
@pytest.mark.parametrize("transport", ["value", "reference"])
def test_types_of_kept_columns_of_csv(tmp_path: Path, transport: Any, cells: list[str], values: list[Any]) -> None:
    """The same in every chunk, whatever its cells alone would say."""
    source = write_csv(tmp_path / "in.csv", [{"prompt": "a", "kept": cell} for cell in cells])
    read = ReadOptions(keep_columns=("kept",))
    with prepare(source, model="m", output=tmp_path / "o", read=read, chunk_rows=1, transport=transport) as submission:
        tables = [chunk.kept for chunk in read_chunks(submission).values()]
    found = pa.concat_tables([table for table in tables if table is not None])["kept"].to_pylist()
    assert (found, [*map(type, found)]) == (values, [*map(type, values)])


def test_kept_fields_of_json_lines_are_data(tmp_path: Path) -> None:
    """Whatever they are called, as columns of tables are."""
    ask = {"prompt": "a", "max_tokens": 3}
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 3}}
    for line, extra, read in (
        (ask, {"label": "x", "max_token": 5, "stream": True, "url": "x://"}, ReadOptions()),
        (batch, {"label": "x"}, ReadOptions()),
        ({"q": "a", "max_tokens": 3}, {"prompt": "b", "max_token": 5}, ReadOptions(prompt_column="q")),
        ({"q": "a", "max_tokens": 3}, {"messages": [], "max_token": 5}, ReadOptions(template="{q}", chat=False)),
    ):
        source = write_jsonl(tmp_path / "in.jsonl", [{**line, **extra}])
        with pytest.raises(InvalidInputError):
            prepare(source, model="m", output=tmp_path / "o", read=read)
        read = dataclasses.replace(read, keep_columns=tuple(extra))
        with prepare(source, model="m", output=tmp_path / "o", read=read, transport="reference") as submission:
            chunk = read_chunks(submission)[0]
        assert (chunk.rows[0].prompt, chunk.rows[0].params.max_tokens) == ("a", 3)
        assert chunk.kept is not None
        assert list(chunk.kept.to_pylist()[0].values()) == list(extra.values())


def test_templates_and_messages_of_tables(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    rows = [{"q": "Ahoj", "when": datetime.date(2026, 1, 2), "n": 3, "dialog": messages, "unused": b"\xff"}]
    source = write_parquet(tmp_path / "in.parquet", rows)
    cases: list[tuple[ReadOptions, Any]] = [
        (ReadOptions(template="{n}x {q} on {when}", chat=False), "3x Ahoj on 2026-01-02"),
        (ReadOptions(messages_column="dialog"), messages),
        (ReadOptions(prompt_column="q"), "Ahoj"),
    ]
    for read, expected in cases:
        with prepare(source, model="m", output=tmp_path / "o", read=read, transport="reference") as submission:
            (row,) = all_rows(read_chunks(submission))
            assert row.input == expected


@pytest.mark.parametrize("name", ["CSV", "Parquet", "an Arrow stream"])
def test_a_messages_column_may_hold_json_text(name: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "u"}]
    file, write = FORMATS[name]
    source = write(tmp_path / file, [{"dialog": json.dumps(messages), "messages": "unused"}])
    with prepare(source, model="m", output=tmp_path / "o", read=ReadOptions(messages_column="dialog")) as submission:
        (row,) = all_rows(read_chunks(submission))
    assert row.messages == messages


def test_settings_of_tables(tmp_path: Path) -> None:
    """Columns with nulls have whole numbers as floats and "not given" as NaN."""
    rows = [
        {"prompt": "a", "max_tokens": 16.0, "temperature": float("nan"), "custom_id": 7, "stop": "5"},
        {"prompt": "b", "max_tokens": None, "temperature": 0.5, "custom_id": 8, "stop": None},
    ]
    source = write_parquet(tmp_path / "in.parquet", rows)
    with prepare(source, model="m", output=tmp_path / "o") as submission:
        first, second = all_rows(read_chunks(submission))
    assert (first.params.max_tokens, first.params.temperature, first.custom_id) == (16, None, "7")
    assert list(first.params.stop or ()) == ["5"]
    assert (second.params.max_tokens, second.params.temperature, second.custom_id) == (None, 0.5, "8")
    text = 'prompt,max_tokens,stop,custom_id\na,5,"[""x"", ""y""]",\nb,,,id\n'
    (tmp_path / "in.csv").write_text(text)
    with prepare(tmp_path / "in.csv", model="m", output=tmp_path / "o") as submission:
        first, second = all_rows(read_chunks(submission))
    assert (first.params.max_tokens, list(first.params.stop or ()), first.custom_id) == (5, ["x", "y"], "")
    assert (second.params.max_tokens, second.params.stop, second.custom_id) == (None, None, "id")


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (ReadOptions(), r"has none of the columns prompt, messages, .*it has text, label, max_tokens: name one with"),
        (ReadOptions(prompt_column="texts"), "no column 'texts', which `prompt_column` names.*did you mean text"),
        (ReadOptions(template="{a}"), "no column 'a', which `template` names"),
        (ReadOptions(prompt_column="text", keep_columns=("b",)), "no column 'b', which `keep_columns` names"),
    ],
)
@pytest.mark.parametrize("name", ["CSV", "Parquet", "an Arrow stream"])
def test_columns_that_are_missing(name: str, read: ReadOptions, words: str, tmp_path: Path, rng: random.Random) -> None:
    file, write = FORMATS[name]
    source = write(tmp_path / file, make_rows(rng, 3))
    with pytest.raises(InvalidInputError, match=words):
        prepare(source, model="m", output=tmp_path / "o", read=read)


def test_options_that_contradict_each_other() -> None:
    for options in ({"template": "{a}", "prompt_column": "b"}, {"messages_column": "a", "prompt_column": "b"}):
        with pytest.raises(InvalidParameterError, match="give one of them"):
            ReadOptions(**options)
    with pytest.raises(InvalidParameterError, match="each once"):
        ReadOptions(keep_columns=("a", "a"))


@pytest.mark.parametrize("name", ["JSON lines", "CSV", "Parquet"])
@pytest.mark.parametrize("transport", ["value", "reference"])
def test_columns_called_as_settings_may_be_data(name: str, transport: Any, tmp_path: Path) -> None:
    file, write = FORMATS[name]
    rows = [{"q": f"a{i}", "n": 999999, "custom_id": "same", "metadata": "text", "max_tokens": -i} for i in range(4)]
    source = write(tmp_path / file, rows)
    options: dict[str, Any] = {"model": "m", "output": tmp_path / "o", "transport": transport, "chunk_rows": 3}
    for read in (ReadOptions(prompt_column="q"), ReadOptions(template="{q}")):
        with pytest.raises(InvalidInputError):
            prepare(source, read=read, **options)
    for wanted in ({"prompt_column": "q"}, {"template": "{q}", "chat": False}):
        read = ReadOptions(settings=False, keep_columns=("n", "metadata"), **wanted)
        with prepare(source, read=read, **options) as submission:
            chunks = read_chunks(submission)
        assert all_rows(chunks) == [Row(row_index=i, prompt=f"a{i}") for i in range(4)]
        assert chunks[1].kept is not None
        assert chunks[1].kept["input_metadata"].to_pylist() == ["text"]
    with pytest.raises(InvalidParameterError, match="settings=False: needs one of `prompt_column`"):
        ReadOptions(settings=False)
