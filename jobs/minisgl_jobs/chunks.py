"""Chunks as bytes: their rows, or where they are, in one zstd frame; and what makes two chunks the same.

Knows nothing of Redis or files. Called by the client, which puts chunks into the queue, and by frontends, which take
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import msgspec
import pyarrow as pa
import zstandard

from minisgl_batch.errors import InvalidInputError, QueueError
from minisgl_jobs.kept import encode_table, hash_columns
from minisgl_jobs.model import MAX_CHUNK_ROWS, Row

MAX_CHUNK_BYTES = 1 << 30  # decompressed; a payload that says more is refused before anything is allocated


class RowsAndColumns(msgspec.Struct, frozen=True, tag="rows"):
    """A chunk with columns that are copied to the output, as `encode_table` gives them."""

    rows: list[Row]
    kept: bytes


class ChunkReference(msgspec.Struct, frozen=True, tag="reference", omit_defaults=True):
    """Where a chunk's rows are.

    Attributes:
        files: names below the job's input, "" for the input itself; the rows go on from one to the next.
        position: of the first row in the first file; in bytes or rows, see `RecordFile`.
        lines_read: before it.
        sha256: `chunk_sha256` of the rows as they were when they were checked, raw.
        faulty: rows that can't be used, which reading a part of the input may not show: a repeated `custom_id`.
    """

    files: tuple[str, ...]
    position: int
    lines_read: int
    sha256: bytes
    faulty: list[Row] = []


ChunkPayload: TypeAlias = list[Row] | RowsAndColumns | ChunkReference

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ChunkPayload] = msgspec.msgpack.Decoder(ChunkPayload)


def iter_chunks(rows: Iterable[Row], chunk_rows: int = MAX_CHUNK_ROWS) -> Iterator[list[Row]]:
    """Consecutive chunks of `chunk_rows` rows; the last one may be shorter."""
    remaining = iter(rows)
    while chunk := list(islice(remaining, chunk_rows)):
        yield chunk


def encode_chunk(rows: Sequence[Row], kept: pa.Table | None = None) -> bytes:
    """The payload of a chunk that holds its rows.

    Raises:
        InvalidInputError: the rows are larger than MAX_CHUNK_BYTES together.
    """
    packed = _encoder.encode(rows if kept is None else RowsAndColumns(list(rows), encode_table(kept)))
    if len(packed) > MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"rows with row_index {rows[0].row_index} to {rows[-1].row_index} hold {len(packed) >> 20} MiB together, "
            f"more than the {MAX_CHUNK_BYTES >> 20} MiB of a chunk: use fewer rows a chunk, or shorten them"
        )
    return zstandard.ZstdCompressor().compress(packed)


def encode_reference(reference: ChunkReference) -> bytes:
    """The payload of a chunk whose rows are elsewhere."""
    return zstandard.ZstdCompressor().compress(_encoder.encode(reference))


def decode_payload(payload: bytes) -> ChunkPayload:
    """What a payload holds.

    Raises:
        QueueError: it is damaged, not one of ours, or larger than MAX_CHUNK_BYTES.
    """
    try:
        num_bytes = zstandard.frame_content_size(payload)
        if not 0 <= num_bytes <= MAX_CHUNK_BYTES:
            raise QueueError(f"a chunk's payload has an unlikely size ({num_bytes} bytes): refused")
        found = _decoder.decode(zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False))
    except (zstandard.ZstdError, msgspec.DecodeError, RecursionError) as error:
        raise QueueError(f"a chunk's payload is damaged: {error}") from error
    rows = found.faulty if isinstance(found, ChunkReference) else _rows(found)
    for row in rows:
        if (row.prompt, row.messages, row.prompt_token_ids, row.error).count(None) != 3:
            raise QueueError(f"a chunk's payload is damaged: row {row.row_index} must have exactly one prompt")
    return found


def decode_chunk(payload: bytes) -> list[Row]:
    """The rows of a payload that holds them.

    Raises:
        QueueError: it doesn't, or as `decode_payload`.
    """
    found = decode_payload(payload)
    if isinstance(found, ChunkReference):
        raise QueueError("a chunk's payload holds no rows: they are to be read from the job's input")
    return _rows(found)


def chunk_sha256(rows: Sequence[Row], kept: pa.Table | None = None) -> str:
    """What identifies a chunk's input: the positions and contents of its rows, whatever the compression."""
    digest = hashlib.sha256(_encoder.encode(rows))
    if kept is not None:
        hash_columns(digest, kept)
    return digest.hexdigest()


def _rows(found: list[Row] | RowsAndColumns) -> list[Row]:
    return found.rows if isinstance(found, RowsAndColumns) else found
