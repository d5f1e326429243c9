"""Typed messages between a frontend and the engine (rank 0), as MessagePack.

The same messages travel over ZeroMQ from a frontend process and as plain objects from the in-process `LLM`. They carry
token ids only: ranks load no tokenizer.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl_batch.sampling_params import EngineSampling


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request for the engine.

    Attributes:
        uid: the frontend's number for it; never reused while the frontend lives.
        prompt_ids: int32 little-endian token ids, at least one.
        sampling: concrete sampling values.
    """

    uid: int
    prompt_ids: bytes
    sampling: EngineSampling


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """New requests, in the order they shall be served."""

    requests: list[NewRequest]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop these requests; unknown uids are ignored. Each running one is answered by a FINISH_ABORT."""

    uids: list[int]


class DropCache(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Forget all cached prefixes; without effect while requests are here."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Leave the loop at once; the sender has what it wants."""


ToEngine: TypeAlias = AddRequests | AbortRequests | DropCache | Shutdown

# StepOutput.finish, one byte per token
NOT_FINISHED, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = range(4)
FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ABORT: "abort"}


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one engine since its start, and its load now."""

    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_free_pages: int = 0  # free or evictable
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_steps: int = 0
    num_retractions: int = 0


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of tokens, as `engine.scores` packs them: int32 words, 2 + 2 * num_top for each token.

    Attributes:
        num_top: how many of the most probable tokens are named; at least as many as each request asked for.
        uids: int64; requests whose new token is scored.
        sampled: the scores of those tokens.
        prompts: (uid, position of the first token, scores) of tokens of prompts. A part may come twice.
    """

    num_top: int
    uids: bytes
    sampled: bytes
    prompts: list[tuple[int, int, bytes]]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one engine step made: parallel flat arrays, a request at most once.

    Attributes:
        uids: int64; requests that got a token or ended.
        tokens: int32; the new token, or -1 where a request ended without one (abort).
        finish: uint8; NOT_FINISHED or how the request ended (see FINISH_REASONS).
        first_uids: requests whose first token this is, with
        first_cached: how many of their prompt tokens came from the prefix cache.
        stats: the engine's counters after this step.
        scores: of requests that ask for them; None: nobody did.
    """

    uids: bytes
    tokens: bytes
    finish: bytes
    first_uids: list[int]
    first_cached: list[int]
    stats: EngineStats
    scores: Scores | None = None


class RequestsRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Requests that the engine can't serve, such as those larger than the whole KV pool: (uid, why)."""

    refused: list[tuple[int, str]]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine's first message: it serves from now on.

    Attributes:
        max_seq_len: longest prompt + output in tokens.
        max_running: most requests in one decode step.
        num_pages, page_size: the KV pool.
        description: what runs where, for logs and the manifest (dtype, device, attention backend, tp).
    """

    max_seq_len: int
    max_running: int
    num_pages: int
    page_size: int
    description: dict[str, str | int]


FromEngine: TypeAlias = StepOutput | RequestsRefused | Ready

to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
tick_decoder: msgspec.msgpack.Decoder[list[ToEngine]] = msgspec.msgpack.Decoder(list[ToEngine])
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
encoder = msgspec.msgpack.Encoder()
