"""Chunk payloads: hostile or damaged ones are refused, equal rows have equal identities."""

from __future__ import annotations

import random

import msgspec
import pytest
import zstandard

from minisgl_batch.errors import InvalidInputError, QueueError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.chunks import chunk_sha256, decode_chunk, encode_chunk, iter_chunks
from minisgl_jobs.model import Row, RowError

ROWS = [
    Row(row_index=4, prompt="a", params=SamplingParams(temperature=1, stop=["x"]), custom_id="é", metadata='{"k": 1}'),
    Row(row_index=5, messages=[{"role": "user", "content": "😀"}]),
    Row(row_index=6, error=RowError("invalid_request", "line 7: prompt is empty")),
]


def compress(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def test_round_trip() -> None:
    assert decode_chunk(encode_chunk(ROWS)) == ROWS
    assert decode_chunk(encode_chunk([])) == []


def test_identity_is_position_and_content() -> None:
    assert chunk_sha256(ROWS) == chunk_sha256(decode_chunk(encode_chunk(ROWS)))
    moved = [msgspec.structs.replace(row, row_index=row.row_index + 1) for row in ROWS]
    changed = [msgspec.structs.replace(ROWS[0], prompt="b"), *ROWS[1:]]
    assert len({chunk_sha256(rows) for rows in (ROWS, moved, changed, ROWS[:2])}) == 4


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"not zstd",
        encode_chunk(ROWS)[:-3],
        encode_chunk(ROWS) + b"more",
        compress(b"\x90", write_content_size=False),
        compress(b"\xdd\x7f\xff\xff\xff"),  # an array of 2^31 items, of which none follows
        compress(b"\x91" * 100_000),  # nested
        compress(msgspec.msgpack.encode([{"row_index": 0}])),
        compress(msgspec.msgpack.encode([{"row_index": 0, "prompt": "a", "prompt_token_ids": [1]}])),
        compress(msgspec.msgpack.encode([{"row_index": 0, "prompt": "a", "params": {"n": 0}}])),
    ],
    ids=range(10),
)
def test_damaged_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(QueueError):
        decode_chunk(payload)


def test_payload_larger_than_the_cap_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = compress(bytes(100_000))
    monkeypatch.setattr("minisgl_jobs.chunks.MAX_CHUNK_BYTES", 99_999)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    with pytest.raises(QueueError, match="100000 bytes"):
        decode_chunk(bomb)
    with pytest.raises(InvalidInputError, match="rows with row_index 8 to 9"):
        encode_chunk([Row(row_index=8, prompt="a" * 60_000), Row(row_index=9, prompt="b" * 60_000)])


def test_chunks_are_consecutive(rng: random.Random) -> None:
    rows = [Row(row_index=i, prompt="a") for i in range(rng.randrange(50))]
    chunk_rows = rng.randint(1, 9)
    chunks = list(iter_chunks(rows, chunk_rows))
    assert [row for chunk in chunks for row in chunk] == rows
    assert all(len(chunk) == chunk_rows for chunk in chunks[:-1])
    assert len(chunks) == -(-len(rows) // chunk_rows)
