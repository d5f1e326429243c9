"""Log-probabilities as a column of results, back from it, and in the shapes of the OpenAI API."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from array import array
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minisgl_batch.errors import QueueError
from minisgl_jobs.export import export_rows
from minisgl_jobs.logprobs import LOGPROBS_TYPE
from minisgl_jobs.model import RowResult, TokenLogprobs
from minisgl_jobs.results import OPTIONAL_COLUMNS, result_schema, results_to_table, table_to_results
from minisgl_jobs.spool import decode_result, encode_result

TEXTS = {i: f"t{i}" for i in range(50)} | {50: "안녕", 51: "\ufffd", 52: ""}


def floats(n: int) -> bytes:
    return array("f", [-random.random() * 9 for _ in range(n)]).tobytes()


def ids(n: int) -> tuple[bytes, list[int]]:
    chosen = random.choices(sorted(TEXTS), k=n)
    return array("i", chosen).tobytes(), chosen


def record(num_tokens: int, num_top: int, *, has_gap: bool = False) -> TokenLogprobs:
    token_ids, tokens = ids(num_tokens)
    top_ids, tops = ids(num_tokens * num_top)
    texts = {i: TEXTS[i] for i in {*tokens, *tops}}
    return TokenLogprobs(token_ids, floats(num_tokens), top_ids, floats(num_tokens * num_top), texts, has_gap)


def entries(found: TokenLogprobs) -> list[dict[str, Any] | None]:
    """What stands in the column, by the record's definition."""
    data = (found.token_ids, found.logprobs, found.top_ids, found.top_logprobs)
    token_ids, logprobs, top_ids, top_logprobs = (array(kind, x).tolist() for kind, x in zip("ifif", data, strict=True))
    size = len(top_ids) // len(token_ids) if token_ids else 0

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": found.texts[token], "token_id": token, "logprob": logprob}

    made: list[dict[str, Any] | None] = [None] if found.has_gap else []
    for i, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        tops = [entry(top_ids[j], top_logprobs[j]) for j in range(i * size, (i + 1) * size)]
        made.append({**entry(token, logprob), "top_logprobs": tops})
    return made


def random_results() -> list[RowResult]:
    """Some without either, some empty, each with other numbers of tokens and of alternatives."""
    results = [
        RowResult(
            row_index=i,
            logprobs=random.choice([None, record(random.randrange(6), random.randrange(4))]),
            prompt_logprobs=random.choice([None, record(random.randrange(6), random.randrange(4), has_gap=True)]),
        )
        for i in range(12)
    ]
    return [*results, RowResult(row_index=12, logprobs=record(0, 3), prompt_logprobs=record(0, 3, has_gap=True))]


def test_columns_are_there_for_those_who_asked() -> None:
    assert not {"logprobs", "prompt_logprobs"} & set(result_schema().names)
    schema = result_schema({"logprobs"})
    assert schema.field("logprobs").type == LOGPROBS_TYPE
    assert "prompt_logprobs" not in schema.names
    assert result_schema(OPTIONAL_COLUMNS).names[12:15] == ["output_token_ids", "logprobs", "prompt_logprobs"]


def test_values_in_the_column_and_in_parquet() -> None:
    results = random_results()
    table = results_to_table(results, OPTIONAL_COLUMNS)
    table.validate(full=True)
    file = io.BytesIO()
    pq.write_table(table, file)
    for read in (table, pq.read_table(file)):
        for name in ("logprobs", "prompt_logprobs"):
            found = [getattr(result, name) for result in results]
            assert read[name].to_pylist() == [None if x is None else entries(x) for x in found]
            assert read[name].to_pylist() == [None if x is None else x.as_list() for x in found]


def test_results_come_back_from_a_table_and_a_spool() -> None:
    results = random_results()
    table = results_to_table(results, OPTIONAL_COLUMNS)
    assert list(table_to_results(table)) == results
    assert list(table_to_results(table.slice(3, 5))) == results[3:8]
    assert [decode_result(encode_result(result)) for result in results] == results


def test_no_results_keep_the_schema() -> None:
    assert results_to_table([], OPTIONAL_COLUMNS).schema == result_schema(OPTIONAL_COLUMNS)


@pytest.fixture
def exported() -> tuple[pa.Table, list[dict[str, Any] | None]]:
    found = TokenLogprobs(
        array("i", [50, 51]).tobytes(),
        array("f", [-0.5, -1.0]).tobytes(),
        array("i", [50, 1, 2, 51]).tobytes(),
        array("f", [-0.5, -2.0, -0.25, -1.0]).tobytes(),
        {i: TEXTS[i] for i in (50, 51, 1, 2)},
    )
    return results_to_table([RowResult(row_index=0, logprobs=found), RowResult(row_index=1)], {"logprobs"}), entries(
        found
    )


def export(table: pa.Table, export_format: Any, **options: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    export_rows(table, export_format, out, **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_as_chats_of_openai_have_them(exported: tuple[pa.Table, Any]) -> None:
    first, second = (
        line["response"]["body"]["choices"][0]["logprobs"] for line in export(exported[0], "openai", chat=True)
    )
    assert second is None
    hello = list("안녕".encode())
    assert first == {
        "content": [
            {
                "token": "안녕",
                "logprob": -0.5,
                "bytes": hello,
                "top_logprobs": [
                    {"token": "안녕", "logprob": -0.5, "bytes": hello},
                    {"token": "t1", "logprob": -2.0, "bytes": list(b"t1")},
                ],
            },
            {
                "token": "\ufffd",
                "logprob": -1.0,
                "bytes": None,
                "top_logprobs": [
                    {"token": "t2", "logprob": -0.25, "bytes": list(b"t2")},
                    {"token": "\ufffd", "logprob": -1.0, "bytes": None},
                ],
            },
        ],
        "refusal": None,
    }


def test_as_completions_of_openai_have_them(exported: tuple[pa.Table, Any]) -> None:
    first, _ = (
        line["response"]["body"]["choices"][0]["logprobs"] for line in export(exported[0], "openai", chat=False)
    )
    assert first == {
        "tokens": ["안녕", "\ufffd"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"안녕": -0.5, "t1": -2.0}, {"t2": -0.25, "\ufffd": -1.0}],
        "text_offset": [0, 2],
    }


def test_in_json_lines_and_csv(exported: tuple[pa.Table, Any]) -> None:
    table, want = exported
    assert export(table, "jsonl")[0]["logprobs"] == want
    out = io.BytesIO()
    export_rows(table, "csv", out)
    first, second = csv.DictReader(io.StringIO(out.getvalue().decode(), newline=""))
    assert json.loads(first["logprobs"]) == want
    assert second["logprobs"] == ""


def test_records_are_sequences_of_their_entries(exported: tuple[pa.Table, Any]) -> None:
    (first, _) = table_to_results(exported[0])
    assert first.logprobs is not None
    for found in (first.logprobs, record(5, 0, has_gap=True), record(0, 0), record(4, 3, has_gap=True)):
        assert [*found] == [found[i] for i in range(len(found))] == found.as_list()
        with pytest.raises(IndexError):
            found[len(found)]
    assert first.logprobs[-1] == first.logprobs.as_list()[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": b"123"},
        {"logprobs": b""},
        {"top_ids": bytes(4)},
        {"top_ids": bytes(12), "top_logprobs": bytes(12)},
        {"texts": {50: "a"}},
    ],
)
def test_damaged_records_are_refused_as_such(exported: tuple[pa.Table, Any], changes: dict[str, Any]) -> None:
    (first, _) = table_to_results(exported[0])
    assert first.logprobs is not None
    fields = dict(zip(TokenLogprobs.__struct_fields__, msgspec.structs.astuple(first.logprobs), strict=True)) | changes
    encoded = msgspec.msgpack.encode({"row_index": 0, "logprobs": list(fields.values())})
    with pytest.raises(QueueError, match="spooled results are damaged: "):
        decode_result(encoded)


def test_texts_of_a_chunk_may_come_to_more_than_two_gibibytes() -> None:
    """That many aren't made here: 64-bit offsets are what it takes."""
    entry = LOGPROBS_TYPE.value_type
    for token in (entry, entry.field("top_logprobs").type.value_type):
        assert token.field("token").type == pa.large_string()


def test_records_are_shown_as_tokens() -> None:
    found = record(random.randint(5, 99), 2)
    ids, values = (array(kind, data).tolist() for kind, data in (("i", found.token_ids), ("f", found.logprobs)))
    first = ", ".join(f"{TEXTS[ids[i]]!r} {values[i]:.3f}" for i in range(4))
    assert repr(found) == f"TokenLogprobs({len(ids)} tokens: {first}, ...)"
    short = record(1, 0, has_gap=True)
    assert re.fullmatch(r"TokenLogprobs\(2 tokens: '.*' -\d\.\d{3}\)", repr(short))
