"""Whatever stands in a line: one Row or one Fault comes out, and good rows survive the way to a worker."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_batch.errors import Fault
from minisgl_batch.other_fields import UNSUPPORTED
from minisgl_jobs.chunks import chunk_sha256, decode_chunk, encode_chunk
from minisgl_jobs.faults import render_faults
from minisgl_jobs.fields import ROW_FIELDS
from minisgl_jobs.model import Row
from minisgl_jobs.rows import ReadOptions, RowReader, read_rows

KNOWN = sorted(
    ROW_FIELDS | UNSUPPORTED.keys() | {"body", "url", "method", "role", "content", "type", "text", "tool_calls"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["user", "assistant", "text", "POST", "/v1/completions", "/v1/chat/completions", "\ud800"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=3), inner),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=3), JSON, max_size=5)
LINES = st.one_of(
    st.binary(max_size=30),
    JSON.map(lambda value: json.dumps(value).encode()),
    OBJECTS.map(lambda value: json.dumps(value).encode()),
    OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
).map(lambda line: line.replace(b"\n", b" "))
OPTIONS = st.builds(
    ReadOptions,
    template=st.sampled_from([None, "{text}", "Say {prompt} {n}"]),
    chat=st.sampled_from([None, True]),
    system=st.sampled_from([None, "s"]),
)


@given(st.lists(LINES, max_size=6), OPTIONS)
@settings(max_examples=250, deadline=None)
def test_any_line_gives_a_row_or_a_fault(lines: list[bytes], options: ReadOptions) -> None:
    items = list(read_rows(lines, options))
    assert len(items) == sum(bool(line.strip()) and line.strip() != b"\xef\xbb\xbf" for line in lines)
    faults = [item for item in items if isinstance(item, Fault)]
    assert all(fault.problem and fault.hint for fault in faults)
    render_faults(faults, len(faults)).encode()
    rows = [item for item in items if isinstance(item, Row)]
    assert decode_chunk(encode_chunk(rows)) == rows
    for row in rows:
        assert row.metadata == "" or isinstance(json.loads(row.metadata), dict)


@given(st.lists(LINES, min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_recorded_rows_are_as_many_and_encodable(lines: list[bytes]) -> None:
    reader = RowReader("in", ReadOptions(on_error="record"))
    rows = [item for item in reader.read(lines) if isinstance(item, Row)]
    assert [row.row_index for row in rows] == list(range(reader.num_rows))
    assert sum(row.error is not None for row in rows) == reader.faults.num_faults
    assert decode_chunk(encode_chunk(rows)) == rows


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(min_size=1, max_size=9)}
    ),
    min_size=1,
    max_size=3,
)
GOOD_ROWS = st.builds(
    lambda asked, rest: {**asked, **rest},
    st.one_of(
        st.fixed_dictionaries({"prompt": st.text(min_size=1)}),
        st.fixed_dictionaries({"messages": MESSAGES}),
        st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1)}),
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(1, 1 << 24),
            "temperature": st.floats(0, 100) | st.integers(0, 100),
            "top_p": st.floats(0, 1, exclude_min=True),
            "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=3),
            "stop_token_ids": st.lists(st.integers(0, 9), max_size=3),
            "ignore_eos": st.booleans(),
            "presence_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.01, 100),
            "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=3),
            "bad_words": st.lists(st.text(min_size=1), max_size=3),
            "metadata": st.dictionaries(st.text(), st.integers() | st.text() | st.floats(0, 1), max_size=3),
        },
    ),
)


@given(st.lists(GOOD_ROWS, max_size=4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_good_rows_arrive_as_they_were_written(objects: list[dict[str, Any]], ascii_only: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only).encode() for row in objects]
    rows = [item for item in read_rows(lines) if isinstance(item, Row)]
    assert len(rows) == len(objects)
    received = decode_chunk(encode_chunk(rows))
    assert received == rows
    assert chunk_sha256(received) == chunk_sha256(rows)
    for row, given_row in zip(received, objects, strict=True):
        assert row.prompt == given_row.get("prompt")
        assert row.messages == given_row.get("messages")
        assert row.prompt_token_ids == given_row.get("prompt_token_ids")
        assert json.loads(row.metadata or "null") == given_row.get("metadata")
        for name, value in json.loads(json.dumps(row.params.to_dict())).items():
            assert value == given_row[name]
