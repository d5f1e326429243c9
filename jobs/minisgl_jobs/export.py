"""Writes results in the formats that other tools take: JSONL, OpenAI batch output, CSV, one Parquet file.

Streams: memory doesn't grow with the dataset. Knows nothing of folders or Redis. Called by `minisgl-batch results`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import chain, groupby
from operator import itemgetter
from typing import IO, Any, Literal, get_args

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from minisgl_batch.errors import InvalidParameterError
from minisgl_jobs.logprobs import openai_logprobs
from minisgl_jobs.results import result_schema

ExportFormat = Literal["jsonl", "openai", "csv", "parquet"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
ENDINGS: dict[str, ExportFormat] = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ROW_GROUP_ROWS = 1 << 16
_ROW_GROUP_BYTES = 64 << 20


def export_rows(
    batches: pa.Table | Iterable[pa.RecordBatch], export_format: ExportFormat, out: IO[bytes], *, chat: bool = True
) -> int:
    """Write results and answer how many lines or rows that made.

    jsonl has one object a result, with `metadata` as an object; openai has one line a row with its samples as choices
    (chat completions, or text completions with `chat=False`), and an `error` for a row without any; csv has a header
    and JSON in the cell of a list or struct. Columns of the input come last; bytes are base64.

    Raises:
        InvalidParameterError: there is no such format.
    """
    stream = batches.to_batches() if isinstance(batches, pa.Table) else batches
    if export_format == "parquet":
        return _write_parquet(stream, out)
    if export_format == "csv":
        return _write_csv(stream, out)
    if export_format == "jsonl":
        return _write_lines((_with_metadata(record) for record in _records(stream)), out)
    if export_format == "openai":
        rows = groupby(_records(stream), itemgetter("row_index"))
        return _write_lines((_openai_line(list(samples), chat) for _, samples in rows), out)
    raise InvalidParameterError("format", f"must be one of {', '.join(EXPORT_FORMATS)}, got {export_format!r}")


def _records(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """Results as dicts, with times as RFC 3339 text; columns of the input may have values that JSON has as text."""
    for batch in batches:
        times = {field.name: field.type.tz for field in batch.schema if pa.types.is_timestamp(field.type)}
        plain = {n: _micros(batch.column(n)) if n in times else batch.column(n) for n in batch.schema.names}
        for record in pa.RecordBatch.from_pydict(plain).to_pylist():
            for name, zone in times.items():
                record[name] = _rfc3339(record[name], zone)
            if record.get("ttft_ms") is not None:
                record["ttft_ms"] = round(record["ttft_ms"], 3)  # what float32 holds, without its noise
            yield record


def _micros(column: pa.Array) -> pa.Array:
    # As integers: Arrow's own conversion needs a time zone database, which small containers lack.
    return column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())


def _rfc3339(micros: int | None, zone: str | None) -> str | None:
    """A moment in UTC, or a local time where the column has no zone."""
    if micros is None:
        return None
    text = (_EPOCH + timedelta(microseconds=micros)).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z" if zone else "")


def _write_lines(objects: Iterable[dict[str, Any]], out: IO[bytes]) -> int:
    encode, num_lines = msgspec.json.Encoder().encode, 0
    for item in objects:
        out.write(encode(item) + b"\n")
        num_lines += 1
    return num_lines


def _with_metadata(record: dict[str, Any]) -> dict[str, Any]:
    metadata = record.get("metadata")
    return {**record, "metadata": msgspec.Raw(metadata.encode())} if metadata else record


def _openai_line(samples: list[dict[str, Any]], chat: bool) -> dict[str, Any]:
    """One line of an OpenAI batch output file for the samples of one row."""
    first = samples[0]
    name = str(first["row_index"])
    line = {
        "id": f"batch_req_{name}",
        "custom_id": first["custom_id"] or f"row-{name}",
        "response": None,
        "error": None,
    }
    done = [sample for sample in samples if sample["status"] == "ok"]
    if not done:
        return {**line, "error": {"code": first["error_type"], "message": first["error_message"]}}
    completion_tokens = sum(sample["completion_tokens"] for sample in done)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": _unix_seconds(done[0]["finished_at"]),
        "model": first["model"],
        "choices": [_choice(sample, chat) for sample in done],
        "usage": {
            "prompt_tokens": first["prompt_tokens"],
            "completion_tokens": completion_tokens,
            "total_tokens": first["prompt_tokens"] + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": first["cached_tokens"]},
        },
    }
    return {**line, "response": {"status_code": 200, "request_id": f"req_{name}", "body": body}}


def _choice(sample: dict[str, Any], chat: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": sample["text"]}
    if sample.get("reasoning_text"):
        message["reasoning_content"] = sample["reasoning_text"]
    answer = {"message": message} if chat else {"text": sample["text"]}
    logprobs = openai_logprobs(sample.get("logprobs"), chat=chat)
    return {"index": sample["sample_index"], **answer, "logprobs": logprobs, "finish_reason": sample["finish_reason"]}


def _unix_seconds(rfc3339: str | None) -> int:
    return int(datetime.fromisoformat(rfc3339.replace("Z", "+00:00")).timestamp()) if rfc3339 else 0


def _write_csv(batches: Iterable[pa.RecordBatch], out: IO[bytes]) -> int:
    stream = iter(batches)
    first = next(stream, None)
    names = (result_schema() if first is None else first.schema).names
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    num_rows = 0
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        for record in _records(stream if first is None else chain([first], stream)):
            writer.writerow([_json(v) if isinstance(v, list | dict | bytes) else v for v in record.values()])
            num_rows += 1
    finally:
        text.detach()  # `out` is the caller's to close
    return num_rows


def _json(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text.strip('"') if isinstance(value, bytes) else text


def _write_parquet(batches: Iterable[pa.RecordBatch], out: IO[bytes]) -> int:
    stream = iter(batches)
    first = next(stream, None)
    schema = result_schema() if first is None else first.schema
    num_rows = 0
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for group in _row_groups(stream if first is None else chain([first], stream)):
            writer.write_table(pa.Table.from_batches(group, schema))
            num_rows += sum(batch.num_rows for batch in group)
    return num_rows


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Batches put together: parts are small, and files of small row groups are slow to read."""
    group: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        group.append(batch)
        num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
        if num_rows >= _ROW_GROUP_ROWS or num_bytes >= _ROW_GROUP_BYTES:
            yield group
            group, num_rows, num_bytes = [], 0, 0
    if group:
        yield group
