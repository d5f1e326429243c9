"""Log-probabilities in results: compact records on their way, an Arrow column in the end, and the shapes of APIs.

Knows nothing of tokenizers: records bring their tokens' texts. Called by `results.py` and `export.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from minisgl_jobs.model import TokenLogprobs

# Texts of a chunk may come to more than 2 GiB, which is where the offsets of plain strings end.
_TOKEN = [pa.field("token", pa.large_string()), pa.field("token_id", pa.int32()), pa.field("logprob", pa.float32())]
_TOP_TYPE = pa.list_(pa.struct(_TOKEN))
LOGPROBS_TYPE = pa.list_(pa.struct([*_TOKEN, pa.field("top_logprobs", _TOP_TYPE)]))
"""One entry for each token, named as in the OpenAI API; null for a prompt's first token."""


def logprobs_to_array(records: Sequence[TokenLogprobs | None]) -> pa.Array:
    """A column of LOGPROBS_TYPE, null where there is no record."""
    ids, values, top_ids, top_values = bytearray(), bytearray(), bytearray(), bytearray()
    texts: dict[int, str] = {}
    offsets: list[int | None] = []
    top_offsets, is_gap = [0], list[bool]()
    for record in records:
        offsets.append(None if record is None else len(is_gap))
        if record is None:
            continue
        if record.has_gap:
            ids += bytes(4)
            values += bytes(4)
            top_offsets.append(top_offsets[-1])
            is_gap.append(True)
        num_tokens = len(record.token_ids) // 4
        num_top = len(record.top_ids) // len(record.token_ids) if num_tokens else 0
        top_offsets += [top_offsets[-1] + num_top * (i + 1) for i in range(num_tokens)]
        is_gap += [False] * num_tokens
        ids += record.token_ids
        values += record.logprobs
        top_ids += record.top_ids
        top_values += record.top_logprobs
        texts |= record.texts
    offsets.append(len(is_gap))
    known = pa.array(list(texts), pa.int32()), pa.array(list(texts.values()), pa.large_string())
    tops = pa.StructArray.from_arrays(_token_arrays(top_ids, top_values, *known), fields=_TOKEN)
    lists = pa.ListArray.from_arrays(pa.array(top_offsets, pa.int32()), tops)
    fields = list(LOGPROBS_TYPE.value_type)
    entries = [*_token_arrays(ids, values, *known), lists]
    tokens = pa.StructArray.from_arrays(entries, fields=fields, mask=pa.array(is_gap, pa.bool_()))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), tokens)


def logprobs_of(column: pa.Array, index: int) -> TokenLogprobs | None:
    """Undo `logprobs_to_array` for one of its rows."""
    if not column[index].is_valid:
        return None
    tokens: pa.StructArray = column[index].values
    has_gap = len(tokens) > 0 and not tokens[0].is_valid
    tokens = tokens[1:] if has_gap else tokens
    ids, values = tokens.field("token_id"), tokens.field("logprob")
    tops = tokens.field("top_logprobs").flatten()
    texts = dict(zip(ids.to_pylist(), tokens.field("token").to_pylist(), strict=True))
    top_texts, top_ids, top_values = tops.flatten()
    texts |= dict(zip(top_ids.to_pylist(), top_texts.to_pylist(), strict=True))
    return TokenLogprobs(_bytes(ids), _bytes(values), _bytes(top_ids), _bytes(top_values), texts, has_gap)


def openai_logprobs(entries: Sequence[dict[str, Any]] | None, *, chat: bool) -> dict[str, Any] | None:
    """A row's entries as a choice of the OpenAI API has them."""
    if entries is None:
        return None
    if chat:
        return {
            "content": [
                {**_spelled(entry), "top_logprobs": list(map(_spelled, entry["top_logprobs"]))} for entry in entries
            ],
            "refusal": None,
        }
    tokens = [entry["token"] for entry in entries]
    ends = _running_lengths(tokens)
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": [end - len(token) for end, token in zip(ends, tokens, strict=True)],
    }


def _spelled(entry: dict[str, Any]) -> dict[str, Any]:
    """A token's bytes aren't known where its text is half a character."""
    text: str = entry["token"]
    return {"token": text, "logprob": entry["logprob"], "bytes": None if "\ufffd" in text else list(text.encode())}


def _running_lengths(texts: Iterable[str]) -> list[int]:
    ends, total = [], 0
    for text in texts:
        total += len(text)
        ends.append(total)
    return ends


def _token_arrays(ids: bytearray, values: bytearray, known_ids: pa.Array, known_texts: pa.Array) -> list[pa.Array]:
    """The arrays of _TOKEN."""
    token_ids = pa.Array.from_buffers(pa.int32(), len(ids) // 4, [None, pa.py_buffer(bytes(ids))])
    logprobs = pa.Array.from_buffers(pa.float32(), len(values) // 4, [None, pa.py_buffer(bytes(values))])
    return [known_texts.take(pc.index_in(token_ids, value_set=known_ids)), token_ids, logprobs]


def _bytes(array: pa.Array) -> bytes:
    """The values of an int32 or float32 array without nulls."""
    start, size = 4 * array.offset, 4 * len(array)
    return bytes(array.buffers()[1][start : start + size]) if size else b""
