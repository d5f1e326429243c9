"""Inputs of every kind: what rows they give, what is wrong with them, and that chunks are read again where they lie."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pyarrow as pa
import pytest

from minisgl_batch.errors import InputUnreachableError, InvalidInputError, InvalidParameterError, UsageError
from minisgl_jobs import submission as submissions
from minisgl_jobs.references import ChunkReader
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.submission import prepare
from tests.jobs.input_files import (
    FORMATS,
    PROMPT,
    all_rows,
    make_rows,
    read_chunks,
    write_jsonl,
    write_parquet,
)


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
