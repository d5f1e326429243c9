"""Chunks of rows as bytes: MessagePack in one zstd frame, and what makes two chunks the same.

Knows nothing of Redis. Called by the client, which puts chunks into the queue, and by frontends, which take them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec
import zstandard

from minisgl_batch.errors import InvalidInputError, QueueError
from minisgl_jobs.model import MAX_CHUNK_ROWS, Row

MAX_CHUNK_BYTES = 1 << 30  # decompressed; a payload that says more is refused before anything is allocated

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Row])


def iter_chunks(rows: Iterable[Row], chunk_rows: int = MAX_CHUNK_ROWS) -> Iterator[list[Row]]:
    """Consecutive chunks of `chunk_rows` rows; the last one may be shorter."""
    remaining = iter(rows)
    while chunk := list(islice(remaining, chunk_rows)):
        yield chunk


def encode_chunk(rows: Sequence[Row]) -> bytes:
    """The payload of a chunk.

    Raises:
        InvalidInputError: the rows are larger than MAX_CHUNK_BYTES together.
    """
    packed = _encoder.encode(rows)
    if len(packed) > MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"rows {rows[0].row_index} to {rows[-1].row_index} hold {len(packed) >> 20} MiB together, "
            f"more than the {MAX_CHUNK_BYTES >> 20} MiB of a chunk: use fewer rows a chunk, or shorten them"
        )
    return zstandard.ZstdCompressor().compress(packed)


def decode_chunk(payload: bytes) -> list[Row]:
    """The rows of a payload.

    Raises:
        QueueError: it is damaged, not one of ours, or larger than MAX_CHUNK_BYTES.
    """
    try:
        num_bytes = zstandard.frame_content_size(payload)
        if not 0 <= num_bytes <= MAX_CHUNK_BYTES:
            raise QueueError(f"a chunk's payload has an unlikely size ({num_bytes} bytes): refused")
        packed = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        rows = _decoder.decode(packed)
    except (zstandard.ZstdError, msgspec.DecodeError, RecursionError) as error:
        raise QueueError(f"a chunk's payload is damaged: {error}") from error
    for row in rows:
        if (row.prompt, row.messages, row.prompt_token_ids, row.error).count(None) != 3:
            raise QueueError(f"a chunk's payload is damaged: row {row.row_index} must have exactly one prompt")
    return rows


def chunk_sha256(rows: Sequence[Row]) -> str:
    """What identifies a chunk's input: the positions and contents of its rows, whatever the compression."""
    return hashlib.sha256(_encoder.encode(rows)).hexdigest()
