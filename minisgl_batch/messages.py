"""Typed messages between a frontend and the engine (rank 0), as MessagePack.

The same messages travel over ZeroMQ from a frontend process and as plain objects from the in-process `LLM`. They carry
token ids only: ranks load no tokenizer.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl_batch.engine_sampling import EngineSampling


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request of a prompt.

    Attributes:
        uid: the frontend's number for it; never reused while the frontend lives.
        sample_index: which of the prompt's samples it is.
        ending: int32 little-endian token ids that follow the prompt's, and of which alone the log-probabilities are
            given; b"": none.
    """

    uid: int
    sample_index: int = 0
    ending: bytes = b""


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What the text must be; see `scheduler.constraints`.

    Attributes:
        grammar: as llguidance takes it; "" on its way to followers, who leave that to rank 0.
        opening: the tokens that may begin reasoning, in which everything is allowed; (): none may come.
        closing: those that end it.
        answering: those that may stand before a text without reasoning.
        in_reasoning: the prompt has begun it.
    """

    grammar: str
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    answering: tuple[int, ...] = ()
    in_reasoning: bool = False


class NewPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt for the engine, with the requests that have it in common.

    Attributes:
        prompt_ids: int32 little-endian token ids, at least one.
        sampling: concrete sampling values of the first sample.
        requests: in the order they shall be served.
        constraint: of each of their texts; None: they are free.
    """

    prompt_ids: bytes
    sampling: EngineSampling
    requests: list[NewRequest]
    constraint: Constraint | None = None

    def sampling_of(self, request: NewRequest) -> EngineSampling:
        """Those of one of its requests; the first sample alone scores the prompt, which is the same for all."""
        if not request.sample_index:
            return self.sampling
        return msgspec.structs.replace(self.sampling, sample_index=request.sample_index, num_prompt_logprobs=-1)


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """New prompts, in the order they shall be served."""

    prompts: list[NewPrompt]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Stop these requests; unknown uids are ignored. Each running one is answered by a FINISH_ABORT."""

    uids: list[int]


class DropCache(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Forget all cached prefixes; without effect while requests are here."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Leave the loop at once; the sender has what it wants."""


class SetVocabulary(msgspec.Struct, frozen=True, array_like=True, tag="vocabulary"):
    """What tokens stand for; comes before the first constrained prompt, since ranks load no tokenizer.

    Attributes:
        tokenizer: the JSON of a Hugging Face tokenizer.
        vocab_size: ids are below it.
        eos_ids: tokens that end a text.
    """

    tokenizer: str
    vocab_size: int
    eos_ids: tuple[int, ...]


ToEngine: TypeAlias = AddRequests | SetVocabulary | AbortRequests | DropCache | Shutdown

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
    """Requests that the engine can't serve, such as those larger than the whole KV pool, or can't go on with.

    Attributes:
        refused: (uid, why).
        error_type: of all of them.
    """

    refused: list[tuple[int, str]]
    error_type: str = "request_refused"


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
    description: dict[str, str | int | bool]


FromEngine: TypeAlias = StepOutput | RequestsRefused | Ready

to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
tick_decoder: msgspec.msgpack.Decoder[list[ToEngine]] = msgspec.msgpack.Decoder(list[ToEngine])
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
encoder = msgspec.msgpack.Encoder()
