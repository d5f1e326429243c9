"""Result rows as Arrow tables: the schema of a dataset, and whether a chunk's results are complete.

Knows nothing of folders or Redis. Called by frontends, which write parts, and by everything that reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from minisgl_batch.choices import ChoiceScore
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.logprobs import LOGPROBS_TYPE, logprobs_of, logprobs_to_array
from minisgl_jobs.model import Row, RowError, RowResult

_TIMESTAMP = pa.timestamp("us", tz="UTC")

_CHOICES_TYPE = pa.list_(
    pa.struct(
        [
            pa.field("text", pa.string()),
            pa.field("logprob", pa.float64()),
            pa.field("num_tokens", pa.int32()),
            pa.field("is_greedy", pa.bool_()),
        ]
    )
)
_SCHEMA = pa.schema(
    [
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("custom_id", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("reasoning_text", pa.string()),
        pa.field("raw_text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_reason", pa.string()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("cached_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        pa.field("output_token_ids", pa.list_(pa.int32())),
        pa.field("logprobs", LOGPROBS_TYPE),
        pa.field("prompt_logprobs", LOGPROBS_TYPE),
        pa.field("choices", _CHOICES_TYPE),
        pa.field("seed", pa.int64()),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("model", pa.string()),
        pa.field("queued_at", _TIMESTAMP),
        pa.field("started_at", _TIMESTAMP),
        pa.field("finished_at", _TIMESTAMP),
        pa.field("ttft_ms", pa.float32()),
        pa.field("metadata", pa.string()),
    ]
)


_LOGPROBS = ("logprobs", "prompt_logprobs")
OPTIONAL_COLUMNS = frozenset({"output_token_ids", *_LOGPROBS, "choices", "reasoning_text", "raw_text"})


def result_schema(optional: Collection[str] = ()) -> pa.Schema:
    """The columns of a dataset, of OPTIONAL_COLUMNS those asked for. Null is "not given" or "doesn't apply"."""
    return pa.schema([field for field in _SCHEMA if field.name in optional or field.name not in OPTIONAL_COLUMNS])


def results_to_table(results: Iterable[RowResult], optional: Collection[str] = ()) -> pa.Table:
    """Results as a table in the order of (row_index, sample_index); columns as in `result_schema`."""
    ordered = sorted(results, key=lambda result: (result.row_index, result.sample_index))
    schema = result_schema(optional)
    columns: dict[str, list[Any]] = {
        "text": [r.text if r.error is None or r.text else None for r in ordered],
        "error_type": [r.error.type if r.error else None for r in ordered],
        "error_message": [r.error.message if r.error else None for r in ordered],
        "choices": [None if r.choices is None else msgspec.to_builtins(r.choices) for r in ordered],
        "queued_at": [_micros(r.queued_at) for r in ordered],
        "started_at": [_micros(r.started_at) for r in ordered],
        "finished_at": [_micros(r.finished_at) for r in ordered],
    }
    arrays = [
        logprobs_to_array([getattr(r, name) for r in ordered])
        if name in _LOGPROBS
        else pa.array(
            columns[name] if name in columns else [getattr(r, name) for r in ordered], schema.field(name).type
        )
        for name in schema.names
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def table_to_results(table: pa.Table) -> Iterator[RowResult]:
    """Undo `results_to_table`; columns of the input are passed over."""
    for batch in table.select([name for name in table.column_names if name in _SCHEMA.names]).to_batches():
        # As integers: Arrow's own conversion of times needs a time zone database, which small containers lack.
        plain = {
            field.name: batch.column(i).cast(pa.int64()) if field.type == _TIMESTAMP else batch.column(i)
            for i, field in enumerate(batch.schema)
            if field.name not in _LOGPROBS
        }
        scored = {name: batch.column(name) for name in _LOGPROBS if name in batch.schema.names}
        for index, record in enumerate(pa.RecordBatch.from_pydict(plain).to_pylist()):
            record |= {name: logprobs_of(column, index) for name, column in scored.items()}
            error_type, error_message = record.pop("error_type"), record.pop("error_message")
            record["text"] = record["text"] or ""
            for name in ("queued_at", "started_at", "finished_at"):
                record[name] = record[name] / 1e6 if record[name] is not None else None
            if record.get("choices") is not None:
                record["choices"] = [ChoiceScore(**choice) for choice in record["choices"]]
            record["queued_at"], record["finished_at"] = record["queued_at"] or 0.0, record["finished_at"] or 0.0
            yield RowResult(**record, error=RowError(error_type, error_message) if error_type else None)


def samples_of(row: Row, defaults: SamplingParams) -> int:
    """How many samples a row of a job with `defaults` asks for; a row that is faulty from the start makes one."""
    if row.error is not None:
        return 1
    if row.params.choices is not None:
        return 1  # the job's `n` is for rows that generate
    return row.params.n or defaults.n or 1


def check_complete(results: Sequence[RowResult], expected: Mapping[int, int]) -> None:
    """Make sure that a chunk has a result for each sample of each row, each once.

    Args:
        results: what is about to be written.
        expected: row index -> number of samples. A row that failed before its samples began has one result instead.

    Raises:
        ValueError: a result is missing, there twice or not of this chunk; a defect of the caller.
    """
    keys = Counter((r.row_index, r.sample_index) for r in results)
    failed = {r.row_index for r in results if r.status == "error" and r.sample_index == 0}
    num_results = Counter(r.row_index for r in results)
    problems = [f"row {row} sample {sample} twice" for (row, sample), count in keys.items() if count > 1]
    for row, num_samples in expected.items():
        if num_results[row] == 1 and row in failed:
            continue
        problems += [f"row {row} sample {sample} missing" for sample in range(num_samples) if (row, sample) not in keys]
    problems += [
        f"row {row} sample {sample} unexpected"
        for row, sample in keys
        if row not in expected or not 0 <= sample < expected[row]
    ]
    if problems:
        raise ValueError(f"results don't match the chunk's rows: {', '.join(problems[:5])} ({len(problems)} in all)")


def _micros(seconds: float | None) -> int | None:
    """Unix seconds as whole microseconds; 0 is "not known"."""
    return round(seconds * 1e6) if seconds else None
