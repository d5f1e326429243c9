"""The nouns of the service as records: job, row, result row. MessagePack in Redis, Parquet at the end.

Records carry a schema version, which clients and workers check before they read anything else. Knows nothing of Redis,
Parquet or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from minisgl_batch.choices import ChoiceScore
from minisgl_batch.errors import SchemaVersionError
from minisgl_batch.reasoning import Reasoning, find_reasoning
from minisgl_batch.sampling_params import SamplingParams

_Record = TypeVar("_Record")

# Raised by the first change after a release that makes records which that release would misread: also by a new field,
# which it would drop. Between two releases it stays, as nobody runs a part of each.
SCHEMA_VERSION = 1
MAX_CHUNK_ROWS = 256


EngineInfo: TypeAlias = dict[str, str | int | float | bool | dict[str, int | float] | None]
"""What an engine says of itself: dtype, device, versions and all else that answers depend on, by name."""


class JobState(str, Enum):
    """Where a job is in its life; the last four are final."""

    SUBMITTING = "submitting"
    QUEUED = "queued"
    RUNNING = "running"
    CANCELING = "canceling"
    FINALISING = "finalising"
    FINISHED = "finished"  # every row succeeded
    PARTIAL = "partial"  # complete, but some rows are error rows
    FAILED = "failed"  # could not be finished; the manifest says why
    CANCELED = "canceled"

    @property
    def is_final(self) -> bool:
        return self.is_complete or self in (JobState.FAILED, JobState.CANCELED)

    @property
    def is_complete(self) -> bool:
        """Whether the job has ended with a result for every row."""
        return self in (JobState.FINISHED, JobState.PARTIAL)


class Priority(str, Enum):
    """Which ring of jobs is served first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class InputInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read, for the manifest.

    Attributes:
        source: path or URI as the user gave it ("-" is stdin, "" is rows given by a program).
        sha256: of the input's bytes as read (before decompression); "" for rows given by a program.
        num_bytes: of the same.
    """

    source: str = ""
    sha256: str = ""
    num_bytes: int = 0


class InputReference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where workers read the rows of a job that doesn't bring them along, and how; see `ReadOptions`.

    Attributes:
        uri: absolute path or URL of a file or folder, without credentials.
    """

    uri: str
    template: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    settings: bool = True
    keep_columns: tuple[str, ...] = ()
    chat: bool | None = None


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """What a job is; fixed at submit.

    Attributes:
        job_id: unique; also the default name of the output folder.
        model: the served model's name that workers of this queue have.
        num_rows, chunk_rows: rows in all and per chunk; chunk c holds rows [c * chunk_rows, (c + 1) * chunk_rows).
        output: absolute folder that the parts, the manifest and `_SUCCESS` go to.
        params: sampling of rows that don't say otherwise.
        seed: job seed; a row without a seed of its own derives one from it and its index.
        system: system message put before each row's messages that have none.
        priority: which ring of jobs.
        submitted_at: Unix seconds, the client's clock.
        token_ids: write the `output_token_ids` column.
        logprobs, prompt_logprobs: write these columns, since the job or a row asks for them.
        choices: write this column, since the job or a row has some.
        reasoning: write the columns `reasoning_text` and `raw_text`, since the job or a row asks for them.
        chat: whether the rows (the first one, if they differ) are chat messages: the shape of OpenAI output.
        input: what was read.
        rows_sha256: of all rows as they were read: the hash of their chunks' `chunk_sha256`, in order.
        reference: where the rows are; None when the chunks' payloads hold them.
        kept: types of the input columns that are copied to the output, as `KeptRows.schema` describes them.
    """

    job_id: str
    model: str
    num_rows: int
    chunk_rows: int
    output: str
    params: SamplingParams = SamplingParams()
    seed: int = 0
    system: str | None = None
    priority: Priority = Priority.NORMAL
    submitted_at: float = 0.0
    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    choices: bool = False
    reasoning: bool = False
    chat: bool = False
    input: InputInfo = InputInfo()
    rows_sha256: str = ""
    reference: InputReference | None = None
    kept: bytes = b""
    schema_version: int = SCHEMA_VERSION

    @property
    def num_chunks(self) -> int:
        return -(-self.num_rows // self.chunk_rows)

    @property
    def optional_columns(self) -> frozenset[str]:
        """Names of the result columns that this job has and others don't."""
        asked = {
            "output_token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "choices": self.choices,
            "reasoning_text": self.reasoning,
            "raw_text": self.reasoning,
        }
        return frozenset(name for name, is_there in asked.items() if is_there)

    def chunk_range(self, chunk: int) -> range:
        """The row indices of a chunk."""
        start = chunk * self.chunk_rows
        return range(start, min(start + self.chunk_rows, self.num_rows))


class RowError(msgspec.Struct, frozen=True):
    """Why a row has no text.

    Attributes:
        type: one word for programs, such as "invalid_request", "prompt_too_long", "worker_lost".
        message: what is wrong and what to do, for people.
    """

    type: str
    message: str


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt of a job. Exactly one of `prompt`, `messages`, `prompt_token_ids`, `error` is set.

    Attributes:
        row_index: its position in the job, from 0.
        custom_id: the user's own name for it, "" when not given.
        prompt: text, tokenized as it is.
        messages: chat messages, rendered by the model's chat template; content is always text (parts are joined).
        prompt_token_ids: token ids, used as they are.
        params: what the row itself says about sampling.
        metadata: the row's `metadata`, as JSON text ("" when not given).
        error: set by the reader when the input's row is faulty and the job records such rows.
    """

    row_index: int
    custom_id: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    params: SamplingParams = SamplingParams()
    metadata: str = ""
    error: RowError | None = None

    @property
    def input(self) -> str | list[int] | list[dict[str, Any]]:
        """The prompt, token ids or messages, whichever it has; an empty list for a faulty row."""
        if self.prompt is not None:
            return self.prompt
        return self.prompt_token_ids if self.prompt_token_ids is not None else self.messages or []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n tokens that follow each other, with the k most probable ones in the place of each.

    A sequence of `{"token": ..., "token_id": ..., "logprob": ..., "top_logprobs": [...]}`, as in the dataset's column.

    Attributes:
        token_ids, logprobs: (n,) little-endian int32 and float32.
        top_ids, top_logprobs: (n, k) little-endian int32 and float32, the most probable first.
        texts: what each of these tokens is by itself.
        has_gap: a token without a log-probability stands before them: a prompt's first.
    """

    token_ids: bytes
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    texts: dict[int, str]
    has_gap: bool = False

    def __post_init__(self) -> None:
        num_tokens, num_top = len(self.token_ids) // 4, len(self.top_ids) // 4
        sizes = [len(values) for values in (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs)]
        if sizes != [4 * num_tokens] * 2 + [4 * num_top] * 2 or num_top % max(1, num_tokens):
            raise ValueError(f"log-probabilities of {sizes} bytes don't belong together")
        known = self.texts.keys()
        if not (known >= {*memoryview(self.token_ids).cast("i")} and known >= {*memoryview(self.top_ids).cast("i")}):
            raise ValueError("log-probabilities of tokens without a text")

    def __repr__(self) -> str:
        """The first few tokens."""
        num_shown, values = 4, memoryview(self.logprobs).cast("f")
        ids = memoryview(self.token_ids).cast("i")[:num_shown].tolist()
        shown = [f"{self.texts[token_id]!r} {value:.3f}" for token_id, value in zip(ids, values, strict=False)]
        more = ["..."] if len(values) > num_shown else []
        return f"TokenLogprobs({len(self)} tokens: {', '.join(shown + more)})"

    def __len__(self) -> int:
        return len(self.token_ids) // 4 + self.has_gap

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        return iter(self.as_list())

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        position = range(len(self))[index] - self.has_gap
        if position < 0:
            return None
        num_top = len(self.top_ids) // max(1, len(self.token_ids))
        here, tops = slice(4 * position, 4 * position + 4), slice(4 * num_top * position, 4 * num_top * (position + 1))
        parts = (self.token_ids[here], self.logprobs[here], self.top_ids[tops], self.top_logprobs[tops])
        return TokenLogprobs(*parts, self.texts).as_list()[0]

    def as_list(self) -> list[dict[str, Any] | None]:
        """All entries at once."""
        token_ids, top_ids = (memoryview(data).cast("i").tolist() for data in (self.token_ids, self.top_ids))
        logprobs, top_logprobs = (memoryview(data).cast("f").tolist() for data in (self.logprobs, self.top_logprobs))
        tops = [self._entry(*pair) for pair in zip(top_ids, top_logprobs, strict=True)]
        num_top = len(top_ids) // max(1, len(token_ids))
        entries = [
            {**self._entry(*pair), "top_logprobs": tops[i * num_top : (i + 1) * num_top]}
            for i, pair in enumerate(zip(token_ids, logprobs, strict=True))
        ]
        return [None, *entries] if self.has_gap else list(entries)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.texts[token_id], "token_id": token_id, "logprob": logprob}


class RowResult(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """One finished sample of a row: a line of the result dataset (timestamps in Unix seconds).

    With `raw_text`, `text` and `reasoning_text` are what it was split into. With `choices`, `text` is the best of them.
    """

    row_index: int
    sample_index: int = 0
    custom_id: str | None = None
    status: Literal["ok", "error"] = "ok"
    text: str = ""
    finish_reason: Literal["stop", "length", "timeout", "repetition", "abort", "error"] = "stop"
    stop_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    output_token_ids: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    seed: int | None = None
    error: RowError | None = None
    model: str = ""
    queued_at: float = 0.0
    started_at: float | None = None
    finished_at: float = 0.0
    ttft_ms: float | None = None
    metadata: str | None = None
    reasoning_text: str | None = None
    raw_text: str | None = None
    choices: list[ChoiceScore] | None = None

    @property
    def whole_text(self) -> str:
        """All that was generated, as streams have it."""
        return self.text if self.raw_text is None else self.raw_text

    @property
    def reasoning(self) -> Reasoning | None:
        """Where the parts of `whole_text` are, if it was split."""
        return None if self.raw_text is None else find_reasoning(self.raw_text, self.reasoning_text or "", self.text)


class _Versioned(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def decode_record(content: bytes, kind: type[_Record], what: str) -> _Record:
    """A record in JSON, whose version is looked at before anything else of it.

    Raises:
        SchemaVersionError: another release wrote it.
        msgspec.DecodeError: it is damaged.
    """
    check_schema_version(msgspec.json.decode(content, type=_Versioned).schema_version, what)
    return msgspec.json.decode(content, type=kind)


def check_schema_version(version: int, what: str) -> None:
    """Raise SchemaVersionError unless this release reads records of `version`."""
    if version != SCHEMA_VERSION:
        newer = "newer" if version > SCHEMA_VERSION else "older"
        raise SchemaVersionError(
            f"{what} was written by a {newer} release (schema {version}, this release reads {SCHEMA_VERSION}): "
            "use the same minisgl-batch version on clients and workers"
        )
