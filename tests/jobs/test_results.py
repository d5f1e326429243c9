"""Result rows as tables: schema, nulls, order, and completeness of a chunk."""

from __future__ import annotations

import random
from datetime import datetime, timezone

import pyarrow as pa
import pytest

from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.model import Row, RowError, RowResult
from minisgl_jobs.results import check_complete, result_schema, results_to_table, samples_of, table_to_results


def test_columns_are_those_of_the_documentation() -> None:
    names = "row_index sample_index custom_id status text finish_reason stop_reason prompt_tokens cached_tokens"
    names += " completion_tokens seed error_type error_message model queued_at started_at finished_at ttft_ms metadata"
    assert result_schema().names == names.split()
    with_ids = result_schema({"output_token_ids"})
    assert with_ids.field("output_token_ids").type == pa.list_(pa.int32())
    assert with_ids.field("row_index").type == pa.int64()
    assert with_ids.field("seed").type == pa.int64()
    assert with_ids.field("finished_at").type == pa.timestamp("us", tz="UTC")


def test_values_nulls_and_order() -> None:
    ok = RowResult(
        row_index=7,
        sample_index=1,
        custom_id="é",
        text="안녕 👩‍💻",
        stop_reason="END",
        prompt_tokens=3,
        output_token_ids=[1, 2],
        seed=2**63 - 1,
        model="m",
        queued_at=1_700_000_000.000001,
        ttft_ms=1.5,
        metadata='{"id": 123456789012345678901234567890}',
    )
    failed = RowResult(row_index=7, status="error", finish_reason="error", error=RowError("worker_lost", "why"))
    empty = RowResult(row_index=6)
    first, second, third = results_to_table([ok, failed, empty], {"output_token_ids"}).to_pylist()
    assert [first["row_index"], second["sample_index"], third["sample_index"]] == [6, 0, 1]
    assert (first["text"], first["custom_id"], first["metadata"], first["queued_at"]) == ("", None, None, None)
    assert (second["text"], second["error_type"], second["error_message"]) == (None, "worker_lost", "why")
    assert third["queued_at"] == datetime(2023, 11, 14, 22, 13, 20, 1, tzinfo=timezone.utc)
    for name in ("custom_id", "text", "stop_reason", "output_token_ids", "seed", "model", "ttft_ms", "metadata"):
        assert third[name] == getattr(ok, name)


def test_results_come_back_from_a_table() -> None:
    ok = RowResult(row_index=1, custom_id="é", text="a", output_token_ids=[1], queued_at=1.5, started_at=2.25, seed=7)
    cut = RowResult(row_index=2, text="half", status="error", finish_reason="abort", error=RowError("aborted", "why"))
    table = results_to_table([ok, cut], {"output_token_ids"})
    assert list(table_to_results(table)) == [ok, cut]
    (bare,) = table_to_results(results_to_table([RowResult(row_index=0)]))
    assert bare == RowResult(row_index=0)
    assert (bare.custom_id, bare.metadata) == (None, None)  # as in the table
    assert "None" not in repr(bare)  # what it hasn't isn't shown


def test_no_results_keep_the_schema() -> None:
    assert results_to_table([]).schema == result_schema()


def test_samples_of_a_row() -> None:
    row, four = Row(row_index=0, prompt="a"), Row(row_index=0, prompt="a", params=SamplingParams(n=4))
    faulty = Row(row_index=0, error=RowError("invalid_request", "why"))
    two = SamplingParams(n=2)
    assert [samples_of(r, d) for r in (row, four, faulty) for d in (SamplingParams(), two)] == [1, 2, 4, 4, 1, 1]


def test_complete_chunks_pass_in_any_order(rng: random.Random) -> None:
    expected = {row: rng.randint(1, 3) for row in range(rng.randrange(20))}
    results = [RowResult(row_index=row, sample_index=s) for row, num in expected.items() for s in range(num)]
    rng.shuffle(results)
    check_complete(results, expected)
    failed = RowResult(row_index=99, status="error", finish_reason="error")
    check_complete([*results, failed], {**expected, 99: 3})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ([(0, 0), (1, 0)], "row 1 sample 1 missing"),
        ([(0, 0), (1, 0), (1, 1), (1, 1)], "row 1 sample 1 twice"),
        ([(0, 0), (1, 0), (1, 1), (2, 0)], "row 2 sample 0 unexpected"),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], "row 0 sample 1 unexpected"),
        ([(1, 0), (1, 1)], "row 0 sample 0 missing"),
    ],
)
def test_incomplete_chunks_are_refused(keys: list[tuple[int, int]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_complete([RowResult(row_index=row, sample_index=sample) for row, sample in keys], {0: 1, 1: 2})
