"""How finished results look inside Redis: one record a sample, batches of them compressed together.

Knows nothing of keys or connections. Called by `leases.py` and by everything that reads results of unfinished chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import zstandard

from minisgl_batch.errors import QueueError
from minisgl_jobs.model import RowResult

MAX_BATCH_BYTES = 1 << 30  # decompressed

_results = msgspec.msgpack.Decoder(RowResult)
_batches = msgspec.msgpack.Decoder(dict[str, bytes])
_encoder = msgspec.msgpack.Encoder()


def encode_result(result: RowResult) -> bytes:
    """One finished sample, as `ChunkQueue.spool` takes it."""
    return _encoder.encode(result)


def decode_result(encoded: bytes) -> RowResult:
    """Undo `encode_result`.

    Raises:
        QueueError: the record is damaged.
    """
    try:
        return _results.decode(encoded)
    except msgspec.DecodeError as error:
        raise QueueError(f"spooled results are damaged: {error}") from error


def sample_name(row_index: int, sample_index: int) -> str:
    """The name of a sample in a spool."""
    return f"{row_index}.{sample_index}"


def encode_batch(results: Mapping[tuple[int, int], bytes]) -> bytes:
    """(row, sample) -> encoded result of samples that are spooled together."""
    return zstandard.compress(_encoder.encode({sample_name(*sample): data for sample, data in results.items()}))


def decode_spool(fields: Iterable[tuple[bytes, bytes]]) -> dict[tuple[int, int], bytes]:
    """(row, sample) -> encoded result, in order: each from the batch that set it first.

    Raises:
        QueueError: the spool is damaged.
    """
    batches: dict[bytes, dict[str, bytes]] = {}
    batch_of: dict[str, bytes] = {}
    for name, value in fields:
        if name.startswith(b"b"):
            batches[name[1:]] = _decode_batch(value)
        elif name not in (b"n", b"rows"):
            batch_of[name.decode()] = value
    results = {}
    for sample, number in batch_of.items():
        row_index, _, sample_index = sample.partition(".")
        results[int(row_index), int(sample_index)] = batches[number][sample]
    return dict(sorted(results.items()))


def _decode_batch(batch: bytes) -> dict[str, bytes]:
    try:
        num_bytes = zstandard.frame_content_size(batch)
        if not 0 <= num_bytes <= MAX_BATCH_BYTES:
            raise QueueError(f"spooled results have an unlikely size ({num_bytes} bytes): refused")
        return _batches.decode(zstandard.decompress(batch))
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise QueueError(f"spooled results are damaged: {error}") from error
