"""Inputs of every format with the same rows, and the rows that their chunks have. Used by the tests beside it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from minisgl_jobs.model import Row
from minisgl_jobs.references import ChunkReader, ChunkRows
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.submission import Submission

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
