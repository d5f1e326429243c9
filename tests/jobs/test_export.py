"""Exports: each format holds every result and can be read by the tools it is for."""

from __future__ import annotations

import csv
import datetime
import io
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minisgl_batch.choices import ChoiceScore
from minisgl_batch.errors import InvalidParameterError
from minisgl_jobs.export import EXPORT_FORMATS, export_rows
from minisgl_jobs.model import RowError, RowResult
from minisgl_jobs.results import result_schema, results_to_table, table_to_results

RESULTS = [
    RowResult(
        row_index=0,
        custom_id="a",
        text='Ahoj,\n"안녕" 👩‍💻',
        prompt_tokens=5,
        cached_tokens=2,
        completion_tokens=3,
        output_token_ids=[7, 8],
        model="m",
        queued_at=1_700_000_000.25,
        finished_at=1_700_000_001.0,
        ttft_ms=12.3,
        metadata='{"id": 123456789012345678901234567890}',
    ),
    RowResult(row_index=1, sample_index=0, text="x", prompt_tokens=4, completion_tokens=1, model="m"),
    RowResult(
        row_index=1, sample_index=1, text="y", prompt_tokens=4, completion_tokens=2, model="m", finish_reason="length"
    ),
    RowResult(row_index=2, custom_id="c", status="error", finish_reason="error", error=RowError("worker_lost", "why")),
]
TABLE = results_to_table(RESULTS, {"output_token_ids"})


def export(export_format: Any, table: Any = TABLE, **options: Any) -> tuple[int, bytes]:
    out = io.BytesIO()
    num_written = export_rows(table, export_format, out, **options)
    return num_written, out.getvalue()


def test_jsonl() -> None:
    num_lines, content = export("jsonl")
    first, *_, last = (json.loads(line) for line in content.splitlines())
    assert num_lines == 4
    assert list(first) == TABLE.schema.names
    assert first["text"] == RESULTS[0].text
    assert first["metadata"] == {"id": 123456789012345678901234567890}
    assert first["queued_at"] == "2023-11-14T22:13:20.250000Z"
    assert first["output_token_ids"] == [7, 8]
    assert first["ttft_ms"] == 12.3
    assert (last["text"], last["error_type"], last["metadata"]) == (None, "worker_lost", None)


def test_openai_chat() -> None:
    num_lines, content = export("openai", iter(TABLE.to_batches(max_chunksize=1)))
    one, two, failed = (json.loads(line) for line in content.splitlines())
    assert num_lines == 3
    assert [line["custom_id"] for line in (one, two, failed)] == ["a", "row-1", "c"]
    body = one["response"]["body"]
    assert one["response"]["status_code"] == 200
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "m", 1_700_000_001)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": RESULTS[0].text}
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    choices = two["response"]["body"]["choices"]
    assert [(choice["index"], choice["finish_reason"]) for choice in choices] == [(0, "stop"), (1, "length")]
    assert two["response"]["body"]["usage"]["total_tokens"] == 7
    assert (failed["response"], failed["error"]) == (None, {"code": "worker_lost", "message": "why"})
    assert len({line["id"] for line in (one, two, failed)}) == 3


def test_openai_reasoning() -> None:
    result = RowResult(0, text="42", reasoning_text="hm", raw_text="<think>hm</think>42")
    table = results_to_table([result], {"reasoning_text", "raw_text"})
    body = json.loads(export("openai", table)[1])["response"]["body"]
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "42", "reasoning_content": "hm"}
    (kept,) = table_to_results(table)
    assert (kept.text, kept.reasoning_text, kept.raw_text) == ("42", "hm", result.raw_text)


def test_choices() -> None:
    scores = [ChoiceScore("yes", -0.5, 1, True), ChoiceScore("no", -1.25, 2, False)]
    table = results_to_table([RowResult(0, text="yes", choices=scores), RowResult(1, text="x")], {"choices"})
    first, second = map(json.loads, export("jsonl", table)[1].splitlines())
    assert first["choices"][1] == {"text": "no", "logprob": -1.25, "num_tokens": 2, "is_greedy": False}
    assert second["choices"] is None
    assert [result.choices for result in table_to_results(table)] == [scores, None]


def test_openai_text() -> None:
    body = json.loads(export("openai", chat=False)[1].splitlines()[0])["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == RESULTS[0].text


def test_csv() -> None:
    num_rows, content = export("csv")
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    assert num_rows == len(rows) == 4
    assert rows[0]["text"] == RESULTS[0].text
    assert rows[0]["output_token_ids"] == "[7,8]"
    assert rows[0]["metadata"] == RESULTS[0].metadata
    assert (rows[3]["text"], rows[3]["status"]) == ("", "error")


def test_parquet_is_one_file_of_large_row_groups() -> None:
    num_rows, content = export("parquet", iter(TABLE.to_batches(max_chunksize=1)))
    assert num_rows == 4
    assert pq.read_table(io.BytesIO(content)).equals(TABLE)
    assert pq.read_metadata(io.BytesIO(content)).num_row_groups == 1
    many = pa.concat_tables([TABLE] * 40_000).combine_chunks()
    _, content = export("parquet", iter(many.to_batches(max_chunksize=256)))
    assert pq.read_metadata(io.BytesIO(content)).num_row_groups == 3


@pytest.mark.parametrize("export_format", EXPORT_FORMATS)
def test_nothing_to_export(export_format: Any) -> None:
    num_written, content = export(export_format, [])
    assert num_written == 0
    if export_format == "parquet":
        assert pq.read_schema(io.BytesIO(content)) == result_schema()
    elif export_format == "csv":
        assert content.decode().split(",")[0] == "row_index"
    else:
        assert content == b""


def test_unknown_format() -> None:
    with pytest.raises(InvalidParameterError, match="one of jsonl, openai, csv, parquet"):
        export("xlsx")


def test_columns_of_the_input_of_any_type() -> None:
    moment = datetime.datetime(2026, 11, 30, 12, 0, 0, 5000)
    columns = {
        "day": pa.array([moment.date(), None]),
        "local": pa.array([moment, None], pa.timestamp("ns")),
        "zoned": pa.array([moment, None], pa.timestamp("ms", "Europe/Prague")),
        "cost": pa.array([Decimal("1.50"), None]),
        "raw": pa.array([b"\xff\0", None]),
        "tags": pa.array([[{"since": moment.date()}], None]),
    }
    table = results_to_table(RESULTS[1:3])
    for name, column in columns.items():
        table = table.append_column(name, column)
    first, second = (json.loads(line) for line in export("jsonl", table)[1].splitlines())
    expected = {
        "day": "2026-11-30",
        "local": "2026-11-30T12:00:00.005000",
        "zoned": "2026-11-30T12:00:00.005000Z",
        "cost": "1.50",
        "raw": "/wA=",
        "tags": [{"since": "2026-11-30"}],
    }
    assert {name: first[name] for name in columns} == expected
    assert {second[name] for name in columns} == {None}
    row = next(csv.DictReader(io.StringIO(export("csv", table)[1].decode())))
    assert {name: row[name] for name in columns} == {**expected, "tags": '[{"since":"2026-11-30"}]'}
    assert pq.read_table(io.BytesIO(export("parquet", table)[1])).schema.names[-6:] == list(columns)
    assert len(export("openai", table)[1].splitlines()) == 1
