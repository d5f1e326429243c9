"""Inputs of every kind: what rows they give, what is wrong with them, and that chunks are read again where they lie.

Over 400 lines since all of it runs over the same inputs, one of each format.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import io
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from minisgl_batch.errors import InputUnreachableError, InvalidInputError, InvalidParameterError, UsageError
from minisgl_jobs import submission as submissions
from minisgl_jobs.model import Row
from minisgl_jobs.references import ChunkReader, ChunkRows
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.submission import Submission, prepare

PROMPT = ReadOptions(prompt_column="text", keep_columns=("label", "text"))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) + "\n" * (i % 7 == 3) for i, row in enumerate(rows)))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(text.getvalue().encode())
    return path


def compressed(write: Callable[..., Path], compress: Callable[[bytes], bytes], suffix: str) -> Callable[..., Path]:
    def write_compressed(path: Path, rows: list[dict[str, Any]]) -> Path:
        plain = write(path, rows).read_bytes()
        path.unlink()
        target = path.with_name(path.name + suffix)
        target.write_bytes(compress(plain))
        return target

    return write_compressed


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]], new: Callable[..., Any] = pa.ipc.new_file) -> Path:
    table = pa.Table.from_pylist(rows)
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    return path


def write_stream(path: Path, rows: list[dict[str, Any]]) -> Path:
    return write_arrow(path, rows, pa.ipc.new_stream)


def write_saved_dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As `datasets.Dataset.save_to_disk` does, with its files out of the order of their names."""
    path.mkdir()
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    half = len(rows) // 2
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        write_stream(path / name, part)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


def write_folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Files in folders, beside what data tools pass over."""
    (path / "b").mkdir(parents=True)
    cut = len(rows) // 3
    write_parquet(path / "a.parquet", rows[:cut])
    write_parquet(path / "b" / "1.parquet", rows[cut : cut + 5])
    write_parquet(path / "b" / "2.parquet", rows[cut + 5 :])
    (path / "_SUCCESS").touch()
    (path / ".hidden.csv").write_text("a,b\n1,2\n")
    return path


FORMATS: dict[str, tuple[str, Callable[..., Path]]] = {
    "JSON lines": ("in.jsonl", write_jsonl),
    "JSON lines, gzip": ("in.jsonl", compressed(write_jsonl, gzip.compress, ".gz")),
    "JSON lines, zstd": ("in.jsonl", compressed(write_jsonl, zstandard.compress, ".zst")),
    "CSV": ("in.csv", write_csv),
    "CSV, zstd": ("in.csv", compressed(write_csv, zstandard.compress, ".zst")),
    "TSV": ("in.tsv", lambda path, rows: write_csv(path, rows, "\t")),
    "Parquet": ("in.parquet", write_parquet),
    "an Arrow file": ("in.arrow", write_arrow),
    "an Arrow stream": ("in.arrow", write_stream),
    "a dataset saved by datasets": ("saved", write_saved_dataset),
    "a folder": ("folder", write_folder),
}


def make_rows(rng: random.Random, num_rows: int) -> list[dict[str, Any]]:
    texts = ["plain", 'quotes " and, commas', "two\nlines", "안녕 👩‍💻", "x" * 3000]
    return [
        {"text": f"{rng.choice(texts)} {i}", "label": f"l{i % 5}", "max_tokens": 1 + i % 9} for i in range(num_rows)
    ]


def read_chunks(submission: Submission, order: list[int] | None = None) -> dict[int, ChunkRows]:
    payloads = dict(submission.payloads())
    reader = ChunkReader()
    try:
        return {chunk: reader.read(submission.spec, chunk, payloads[chunk]) for chunk in order or list(payloads)}
    finally:
        reader.close()


def all_rows(chunks: dict[int, ChunkRows]) -> list[Row]:
    return [row for chunk in sorted(chunks) for row in chunks[chunk].rows]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_by_value_and_by_reference_in_any_order(name: str, tmp_path: Path, rng: random.Random) -> None:
    rows = make_rows(rng, rng.randrange(20, 700))
    file, write = FORMATS[name]
    source = write(tmp_path / file, rows)
    chunk_rows = rng.randrange(1, 257)
    options: dict[str, Any] = {"model": "m", "output": tmp_path / "out", "read": PROMPT, "chunk_rows": chunk_rows}
    with (
        prepare(source, transport="value", **options) as by_value,
        prepare(source, transport="reference", **options) as by_reference,
    ):
        assert by_value.spec.rows_sha256 == by_reference.spec.rows_sha256
        assert by_value.spec.input == by_reference.spec.input
        assert (by_value.spec.reference, by_reference.spec.reference is None) == (None, False)
        assert sum(len(payload) for _, payload in by_reference.payloads()) < 250 * by_reference.spec.num_chunks
        order = list(range(by_value.spec.num_chunks))
        some = [*order, *rng.choices(order, k=5)]
        rng.shuffle(some)
        for chunks in (read_chunks(by_value), read_chunks(by_reference), read_chunks(by_reference, some)):
            found = all_rows(chunks)
            assert [row.prompt for row in found] == [row["text"] for row in rows]
            assert [row.params.max_tokens for row in found] == [row["max_tokens"] for row in rows]
            assert [row.row_index for row in found] == list(range(len(rows)))
            kept = pa.concat_tables([chunks[chunk].kept for chunk in sorted(chunks)])
            assert kept.column_names == ["label", "input_text"]
            assert kept.to_pylist() == [{"label": row["label"], "input_text": row["text"]} for row in rows]


def test_large_inputs_are_left_where_they_are(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": rng.randbytes(50).hex()} for _ in range(400)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    for limit, is_reference in ((1 << 20, False), (5000, True)):
        monkeypatch.setattr(submissions, "MAX_VALUE_BYTES", limit)
        with prepare(source, model="m", output=tmp_path / "o", chunk_rows=10) as submission:
            assert (submission.spec.reference is not None) == is_reference
            assert [row.prompt for chunk in submission.chunks() for row in chunk] == [row["prompt"] for row in rows]
        with prepare([row["prompt"] for row in rows], model="m", output=tmp_path / "o") as submission:
            assert submission.spec.reference is None  # nobody else can read them
    with pytest.raises(InvalidParameterError, match="workers can't read rows themselves"):
        prepare(["a"], model="m", output=tmp_path / "o", transport="reference")


def test_faulty_rows_by_reference(tmp_path: Path) -> None:
    lines = [
        {"custom_id": "a", "prompt": "1"},
        {"custom_id": "a", "prompt": "2"},
        {"prompt": 3},
        {"prompt": "4"},
        {"promt": "5"},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    read = ReadOptions(on_error="record")
    with prepare(
        source, model="m", output=tmp_path / "o", read=read, chunk_rows=1, transport="reference"
    ) as submission:
        first, second, third, fourth, fifth = all_rows(read_chunks(submission))
    assert (first.error, fourth.error) == (None, None)
    assert second.error is not None
    assert "stands on line 1 already" in second.error.message
    assert third.error is not None
    assert third.error.message.startswith("line 3: prompt must be a string")
    assert fifth.error is not None
    assert "say prompt_column/--prompt-column promt (or template/--template)" in fifth.error.message


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


def test_faults_name_file_row_and_column(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_parquet(folder / "a.parquet", [{"prompt": "a", "top_p": 0.5}])
    write_parquet(folder / "b.parquet", [{"prompt": "b", "top_p": 0.5}, {"prompt": "", "top_p": 7.0}])
    with pytest.raises(InvalidInputError) as caught:
        prepare(folder, model="m", output=tmp_path / "o")
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == (str(folder / "b.parquet"), 2, "prompt")
    assert "b.parquet:2  prompt  is empty" in str(caught.value)
    (tmp_path / "in.csv").write_text('prompt,n\na,1\n"two\nlines",2\nb,3,4\n"c",x\n')
    with pytest.raises(InvalidInputError) as caught:
        prepare(tmp_path / "in.csv", model="m", output=tmp_path / "o")
    assert [(fault.line, fault.field) for fault in caught.value.faults] == [(5, ""), (6, "n")]
    assert "3 cells, and the header names 2 columns" in caught.value.faults[0].problem


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('prompt\na\n"b\nc\nd\ne\n', "isn't CSV: unexpected end of data (in lines 3 to 6, read as one row)"),
        ('prompt\na\n"b\nc"d\ne\n', """isn't CSV: ',' expected after '"' (in lines 3 to 4, read as one row)"""),
        (
            'prompt,n\na,\n"b\nc",1,2\ne,\n',
            "has 3 cells, and the header names 2 columns (in lines 3 to 4, read as one row)",
        ),
        ("prompt\na\nb,c\n", "has 2 cells, and the header names 1 columns"),
    ],
)
def test_a_quote_that_takes_other_lines_names_them(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(content)
    with prepare(tmp_path / "in.csv", model="m", output=tmp_path / "o", read=ReadOptions(on_error="record")) as job:
        assert [(fault.line, fault.problem) for fault in job.faults.first] == [(3, problem)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "is a folder without files to read"),
        ({"a.jsonl": b'{"prompt": "a"}', "b.csv": b"prompt,x\na,b\n"}, r"b\.csv is of another format"),
        ({"dataset_dict.json": b'{"splits": ["train", "test"]}'}, "several splits: give one of .*/train, .*/test"),
        ({"in.csv": b"prompt,prompt\na,b\n"}, "names its columns, each once"),
        ({"in.csv": b",prompt\n0,a\n"}, r"in\.csv: column 1 has no name: pandas writes its index so: .*index=False"),
        ({"in.csv": b"prompt,n,\na,1,\n"}, r"in\.csv: column 3 has no name: name it in the first line"),
        ({"in.parquet": b"PAR1 is not all"}, r"in\.parquet can't be read"),
        ({"in.arrow": b"ARROW1\0\0 neither"}, r"in\.arrow can't be read"),
        ({"in.jsonl": b'[{"prompt": "a"}]'}, "one JSON array"),
    ],
)
def test_inputs_that_cannot_be_used(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=words):
        prepare(folder, model="m", output=tmp_path / "o")


def test_options_that_contradict_each_other() -> None:
    for options in ({"template": "{a}", "prompt_column": "b"}, {"messages_column": "a", "prompt_column": "b"}):
        with pytest.raises(InvalidParameterError, match="give one of them"):
            ReadOptions(**options)
    with pytest.raises(InvalidParameterError, match="each once"):
        ReadOptions(keep_columns=("a", "a"))


# --- files that change between submit and reading --------------------------------------------------------------------


def changed_text(path: Path) -> None:
    path.write_text(path.read_text().replace("row 5", "ROW 5"))


def shifted(path: Path) -> None:
    path.write_text('{"prompt": "new"}\n' + path.read_text())


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(("change", "first_bad"), [(changed_text, 5), (shifted, 0), (cut_short, 5)])
def test_a_changed_file_fails_its_rows_clearly(change: Callable[[Path], None], first_bad: int, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(10)])
    with prepare(source, model="m", output=tmp_path / "o", chunk_rows=1, transport="reference") as submission:
        change(source)
        chunks = read_chunks(submission)
    bad = [chunk for chunk in chunks if chunks[chunk].rows[0].error is not None]
    assert bad[0] == first_bad
    assert [row.prompt for row in all_rows(chunks) if row.error is None] == [
        f"row {i}" for i in range(10) if i not in bad
    ]
    error = chunks[bad[0]].rows[0].error
    assert error is not None
    assert error.type == "input_changed"
    assert f"{source} has changed since the job was submitted" in error.message
    assert chunks[bad[0]].sha256 == ""


def test_a_changed_table_fails_its_rows_clearly(tmp_path: Path, rng: random.Random) -> None:
    rows = make_rows(rng, 50)
    source = write_parquet(tmp_path / "in.parquet", rows)
    with prepare(
        source, model="m", output=tmp_path / "o", read=PROMPT, chunk_rows=25, transport="reference"
    ) as submission:
        write_parquet(source, [*rows[:30], {**rows[30], "label": "other"}, *rows[31:]])  # only a kept column
        first, second = read_chunks(submission).values()
        assert first.rows[0].error is None
        assert {row.error.type for row in second.rows if row.error} == {"input_changed"}
        source.write_bytes(b"PAR1" + rng.randbytes(500))
        for chunk in read_chunks(submission).values():
            assert {row.error.type for row in chunk.rows if row.error} == {"input_changed"}


def test_a_file_that_is_not_here_is_another_workers(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with prepare(source, model="m", output=tmp_path / "o", transport="reference") as submission:
        source.unlink()
        with pytest.raises(InputUnreachableError, match=r"in\.jsonl: there is no such file"):
            read_chunks(submission)


# --- other places ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[str]:
    """A store in this process's memory."""
    yield "memory://bucket"
    store = fsspec.filesystem("memory")
    store.rm("/bucket", recursive=True)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_by_url(name: str, bucket: str, tmp_path: Path, rng: random.Random) -> None:
    rows = make_rows(rng, 300)
    file, write = FORMATS[name]
    local = write(tmp_path / file, rows)
    fsspec.filesystem("memory").put(str(local), f"/bucket/{local.name}", recursive=True)
    url = f"{bucket}/{local.name}"
    options: dict[str, Any] = {"model": "m", "output": tmp_path / "out", "read": PROMPT, "chunk_rows": 70}
    with prepare(url, transport="reference", **options) as submission, prepare(local, **options) as here:
        assert submission.spec.reference is not None
        assert submission.spec.reference.uri == url
        assert [row.prompt for row in all_rows(read_chunks(submission, [3, 0, 4, 1, 2]))] == [
            row["text"] for row in rows
        ]
        assert submission.spec.rows_sha256 == here.spec.rows_sha256
        assert submission.spec.input.num_bytes == here.spec.input.num_bytes
    with prepare(local.as_uri(), **options) as by_uri:
        assert by_uri.spec.rows_sha256 == here.spec.rows_sha256


def test_urls_that_cannot_be_read(bucket: str, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe("/bucket/x", b"{}")
    with pytest.raises(InvalidInputError, match=r"bucket/none\.jsonl: there is no such file$"):
        prepare(f"{bucket}/none.jsonl", model="m", output=tmp_path / "o")
    with pytest.raises(UsageError, match="nowhere://x can't be used"):
        prepare("nowhere://x", model="m", output=tmp_path / "o")
    with pytest.raises(UsageError) as caught:
        prepare("s3://key:s3cr3t@bucket/in.jsonl", model="m", output=tmp_path / "o")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    source.chmod(0)
    with pytest.raises(InputUnreachableError, match="Permission denied"):
        prepare(source, model="m", output=tmp_path / "o")


def test_a_signed_url_stays_in_this_process(bucket: str, tmp_path: Path) -> None:
    """Jobs and messages have it without its signature, so workers can't read it; its rows travel with the job."""
    url = f"{bucket}/in.jsonl?sig=s3cr3t"
    fsspec.filesystem("memory").pipe("/bucket/in.jsonl?sig=s3cr3t", b'{"prompt": "a"}\n{"prompt": ""}\n')
    options: dict[str, Any] = {"model": "m", "output": tmp_path / "o", "read": ReadOptions(limit=1)}
    with prepare(url, **options) as submission:
        assert [row.prompt for row in all_rows(read_chunks(submission))] == ["a"]
        assert b"s3cr3t" not in msgspec.json.encode(submission.spec)
    for source, changed in (
        (url, {"transport": "reference"}),
        (url, {"read": None}),
        (f"{bucket}/none?sig=s3cr3t", {}),
        ("nowhere://x?sig=s3cr3t", {}),
        (["a"], {"output": url}),
    ):
        with pytest.raises(UsageError) as caught:
            prepare(source, **{**options, **changed})
        assert "s3cr3t" not in str(caught.value)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As a shell makes one of `<(zcat rows.jsonl.gz)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"prompt": "a"}\n{"prompt": "b"}\n',))
    writer.start()
    with prepare(pipe, model="m", output=tmp_path / "o") as submission:
        assert [row.prompt for row in all_rows(read_chunks(submission))] == ["a", "b"]
    writer.join(10)
    writer = threading.Thread(target=pipe.write_text, args=('{"prompt": "a"}\n',))
    writer.start()
    with pytest.raises(InvalidParameterError, match=r"workers can't read .*/pipe themselves"):
        prepare(pipe, model="m", output=tmp_path / "o", transport="reference")
    writer.join(10)


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


@pytest.mark.parametrize("name", ["an Arrow file", "an Arrow stream", "Parquet", "CSV"])
def test_a_file_that_is_cut_short_while_it_is_read_fails_rows_only(
    name: str, tmp_path: Path, rng: random.Random
) -> None:
    """A file that was mapped into memory would end the process."""
    file, write = FORMATS[name]
    source = write(tmp_path / file, make_rows(rng, 2000))
    with prepare(source, model="m", output=tmp_path / "o", read=PROMPT, transport="reference") as submission:
        payloads = dict(submission.payloads())
        reader = ChunkReader()
        assert reader.read(submission.spec, 0, payloads[0]).rows[0].error is None
        os.truncate(source, 5000)
        for chunk in payloads:
            rows = reader.read(submission.spec, chunk, payloads[chunk]).rows
            assert {row.error.type for row in rows if row.error} <= {"input_changed"}
        assert rows[-1].error is not None
        reader.close()
