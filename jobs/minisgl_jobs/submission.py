"""A job that is ready to be queued: its input read to the end and checked, its chunks encoded and kept in a file.

Nothing of a job goes to Redis before all of it is known to be good. In between it is here, and memory stays flat
whatever the input's size. A chunk's payload holds its rows, or, of a large input, where its rows are. Knows nothing of
Redis. Called by the client and the command line.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

from minisgl_batch.errors import InvalidParameterError, OutputError, StoreUnavailableError, UsageError
from minisgl_batch.sampling_params import MAX_SEED, SamplingParams
from minisgl_batch.words import is_unicode
from minisgl_jobs.chunks import ChunkReference, chunk_sha256, encode_chunk, encode_reference, iter_chunks
from minisgl_jobs.dataset import check_output
from minisgl_jobs.faults import FaultLog
from minisgl_jobs.inputs import Records, open_source
from minisgl_jobs.keys import is_job_id
from minisgl_jobs.model import MAX_CHUNK_ROWS, InputInfo, InputReference, JobSpec, Priority, Row
from minisgl_jobs.places import Place, place
from minisgl_jobs.records import Record
from minisgl_jobs.references import ChunkReader
from minisgl_jobs.resume import Resumption, find_earlier, option_facts, resume
from minisgl_jobs.rows import ReadOptions, RowReader
from minisgl_jobs.sources import STDIN, object_lines
from minisgl_jobs.stores import safe_name

Source: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""A path or URL of a file or folder, "-" for stdin, or rows as dicts, prompts, chats or token ids."""

Transport: TypeAlias = Literal["auto", "value", "reference"]
"""Whether rows travel through Redis, or workers read them where they are; by default as MAX_VALUE_BYTES has it."""

DEFAULT_OUTPUTS = "outputs"
NUM_EXAMPLES = 3
MAX_VALUE_BYTES = (
    64 << 20
)  # of payloads that hold rows; a larger job's rows stay where they are, if workers can read it
_IN_MEMORY_BYTES = 16 << 20
_MAX_STEM_CHARS = 40
_COLUMN_FIELDS = ("logprobs", "prompt_logprobs", "split_reasoning", "choices")


class Submission:
    """Use as a context manager; `Client.submit_prepared` sends it.

    Attributes:
        spec: the job.
        overwrite: whether a dataset in the output folder is to be removed.
        faults: of rows that are recorded as error rows.
        models: models that OpenAI lines name, the first few; the job runs on its own.
        has_tools: whether the job or a row has tools.
        examples: its first rows.
        resumption: what of the job is in the output already; None when it begins anew.
    """

    def __init__(self, spec: JobSpec, rows: _CheckedRows, *, overwrite: bool, resumption: Resumption | None) -> None:
        self.spec = spec
        self.resumption = resumption
        self.overwrite = overwrite
        self.faults: FaultLog = rows.reader.faults
        self.models: list[str] = rows.reader.models
        self.has_tools = bool(spec.params.tools) or rows.has_tools
        self.examples: list[Row] = rows.examples
        self._checked = rows
        self._chunks = rows.values if spec.reference is None else rows.references

    @property
    def num_bytes(self) -> int:
        """Of all payloads together."""
        return self._chunks.num_bytes

    def payloads(self) -> Iterator[tuple[int, bytes]]:
        """Each chunk and its payload, as `JobQueue.append` takes them, without those that need none any more."""
        done = self.resumption.done if self.resumption is not None else {}
        return ((chunk, payload) for chunk, payload in enumerate(self._chunks) if done.get(chunk, 1))

    def chunks(self) -> Iterator[list[Row]]:
        """The rows of each chunk; an input that is left where it is is read once more.

        Raises:
            InputUnreachableError: that can't be read any more.
        """
        reader = ChunkReader()
        try:
            for chunk, payload in enumerate(self._chunks):
                yield reader.read(self.spec, chunk, payload).rows
        finally:
            reader.close()

    def close(self) -> None:
        """Remove the files."""
        self._checked.close()

    def __enter__(self) -> Submission:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def prepare(
    source: Source,
    *,
    model: str,
    output: str | os.PathLike[str] | None = None,
    params: SamplingParams | None = None,
    read: ReadOptions | None = None,
    priority: Priority | str = Priority.NORMAL,
    chunk_rows: int = MAX_CHUNK_ROWS,
    seed: int | None = None,
    token_ids: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    job_id: str | None = None,
    transport: Transport = "auto",
) -> Submission:
    """Read an input to its end and check all of it; nothing is queued or changed.

    A job whose output is in the folder already goes on with it, under its old id and in its old chunks.

    Arguments as `Client.submit`; `read` holds those that say how rows are read.

    Raises:
        InvalidInputError: the input can't be read or has faults, which it lists, or holds no rows.
        OutputError: the output folder holds another job's dataset, or can't be written.
        UsageError: an argument has a value that can't be used; names it.
    """
    given_id, job_id = job_id, new_job_id(source) if job_id is None else job_id
    _check_arguments(source, model, chunk_rows, seed, job_id, transport)
    folder = output_folder(output, job_id)
    if overwrite and retry_failed:
        raise InvalidParameterError("retry_failed", "stands beside `overwrite`, which leaves nothing to retry")
    if retry_failed and output is None and given_id is None:
        raise InvalidParameterError("retry_failed", "needs the dataset whose rows have failed: give its `output`")
    level = _priority(priority)
    read, params = read or ReadOptions(), params or SamplingParams()
    earlier = None if overwrite else find_earlier(folder)
    if earlier is not None:
        earlier.check(folder, option_facts(model, params, read.system, token_ids=token_ids))
        for name, value, old in (("job_id", given_id, earlier.job_id), ("seed", seed, earlier.seed)):
            if value not in (None, old):
                earlier.refuse(folder, f"{name} is {value} and was {old}")
        job_id, seed, chunk_rows = earlier.job_id, earlier.seed, earlier.chunk_rows
    check_output(folder, job_id=job_id, overwrite=overwrite or earlier is not None)
    rows, info, uri = _read_all(source, read, params, chunk_rows, transport)
    asked = rows.asked | _columns_of(params)
    spec = JobSpec(
        job_id=job_id,
        model=model,
        num_rows=rows.reader.num_rows,
        chunk_rows=chunk_rows,
        output=str(folder),
        params=params,
        seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
        system=read.system,
        priority=level,
        submitted_at=time.time(),
        token_ids=token_ids,
        logprobs="logprobs" in asked,
        prompt_logprobs="prompt_logprobs" in asked,
        choices="choices" in asked,
        chat=rows.examples[0].messages is not None,
        input=info,
        rows_sha256=rows.sha256,
        reference=_reference(uri, read) if rows.is_reference else None,
        reasoning="split_reasoning" in asked,
        kept=rows.kept,
    )
    try:
        resumption = None if earlier is None else resume(folder, earlier, spec, rows.hashes, retry_failed=retry_failed)
    except BaseException:
        rows.close()
        raise
    return Submission(spec, rows, overwrite=overwrite, resumption=resumption)


def _read_all(
    source: Source, read: ReadOptions, params: SamplingParams, chunk_rows: int, transport: Transport
) -> tuple[_CheckedRows, InputInfo, str]:
    """All rows, what was read, and where workers find it, "" if they can't."""
    if not isinstance(source, str | os.PathLike):
        return _CheckedRows("rows", object_lines(source), read, params, chunk_rows, transport), InputInfo(), ""
    with open_source(source, read.columns) as records:
        rows = _CheckedRows(records.name, records, read, params, chunk_rows, transport, records)
        try:
            return rows, records.info(), records.uri
        except BaseException:
            rows.close()
            raise


def _reference(uri: str, read: ReadOptions) -> InputReference:
    return InputReference(
        uri,
        template=read.template,
        prompt_column=read.prompt_column,
        messages_column=read.messages_column,
        settings=read.settings,
        keep_columns=read.keep_columns,
        chat=read.chat,
    )


def new_job_id(source: Source) -> str:
    """A name that tells where the rows are from and when, such as `prompts-20261130-1a2b3c4d`."""
    name = "rows"
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        name = "stdin" if path == STDIN else Path(path.rstrip("/")).name.lstrip(".").partition(".")[0]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:_MAX_STEM_CHARS] or "rows"
    return f"{stem}-{time.strftime('%Y%m%d')}-{secrets.token_hex(4)}"


def output_folder(output: str | os.PathLike[str] | None, job_id: str) -> Place:
    """A job's output folder, a local one as an absolute path; by default `outputs/<job_id>` here.

    Raises:
        InvalidParameterError: it isn't a folder's name, or a URL that nothing installed here writes to.
        StoreUnavailableError: the URL's store doesn't answer.
    """
    name = os.fspath(output) if output is not None else os.path.join(DEFAULT_OUTPUTS, job_id)
    if safe_name(name) != name:
        raise InvalidParameterError("output", f"must be a URL without a question mark: {safe_name(name)}?...")
    try:
        folder = place(name)
    except StoreUnavailableError:
        raise
    except UsageError as error:
        raise InvalidParameterError("output", str(error)) from None
    if not is_unicode(str(folder)):
        raise InvalidParameterError("output", f"isn't valid Unicode: {str(folder)!r}; jobs and manifests name it")
    if os.path.exists(str(folder)) and not os.path.isdir(str(folder)):
        raise InvalidParameterError("output", f"{folder} is a file: name a folder, which may be a new one")
    return folder


def _check_arguments(
    source: Source, model: str, chunk_rows: int, seed: int | None, job_id: str, transport: Transport
) -> None:
    if not isinstance(source, Iterable | os.PathLike):
        raise UsageError(f"the rows must be a path, a URL or a list of rows, got {source!r}")
    if isinstance(source, Mapping):
        raise UsageError("the rows must be a list or another iterable of rows, not a single one: write [row]")
    if not model:
        raise InvalidParameterError("model", "is empty: give the name that the workers serve")
    if not 1 <= chunk_rows <= MAX_CHUNK_ROWS:
        raise InvalidParameterError("chunk_rows", f"must be between 1 and {MAX_CHUNK_ROWS}, got {chunk_rows}")
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise InvalidParameterError("seed", f"must be between 0 and {MAX_SEED}, got {seed}")
    if transport not in get_args(Transport):
        raise InvalidParameterError("transport", f"must be one of {', '.join(get_args(Transport))}, got {transport!r}")
    if not is_job_id(job_id):
        raise InvalidParameterError("job_id", f"must be up to 128 letters, digits, '_' and '-', got {job_id!r}")


def _priority(priority: Priority | str) -> Priority:
    try:
        return Priority(priority)
    except ValueError:
        names = ", ".join(level.value for level in Priority)
        raise InvalidParameterError("priority", f"must be one of {names}, got {priority!r}") from None


def _columns_of(params: SamplingParams) -> set[str]:
    """The fields that make columns of their own, of those that parameters have."""
    given = {name: getattr(params, name) for name in _COLUMN_FIELDS}
    return {name for name, value in given.items() if value is not None and value is not False}


class _CheckedRows:
    """The rows of an input after they were all read.

    Attributes:
        values, references: payloads of all chunks; those that hold rows are given up when they become too large.
        hashes: `chunk_sha256` of all chunks, raw.
        is_reference: whether the references are to be used.
        kept: types of the kept columns.
        asked: which of the fields that make columns of their own some row has.
        has_tools: whether some row has tools.
    """

    def __init__(
        self,
        name: str,
        records: Iterable[Record],
        options: ReadOptions,
        params: SamplingParams,
        chunk_rows: int,
        transport: Transport,
        source: Records | None = None,
    ) -> None:
        """
        Args:
            source: knows where the records are, if they come from files.
        """
        self.reader = RowReader(name, options, defaults=params)
        self.values, self.references = _ChunkFile(), _ChunkFile()
        self.examples: list[Row] = []
        self.is_reference = transport == "reference"
        can_refer = source is not None and bool(source.uri)
        if self.is_reference and not can_refer:
            raise InvalidParameterError("by_reference", f"workers can't read {name} themselves: give a file")
        self.hashes: list[bytes] = []
        self.asked: set[str] = set()
        self.has_tools = False
        try:
            for rows in iter_chunks(self.reader.rows(records, source), chunk_rows):
                self.examples += rows[: NUM_EXAMPLES - len(self.examples)]
                self.asked.update(*(_columns_of(row.params) for row in rows))
                self.has_tools = self.has_tools or any(row.params.tools for row in rows)
                kept = self.reader.kept.take()
                sha256 = chunk_sha256(rows, kept)
                self.hashes.append(bytes.fromhex(sha256))
                if can_refer and source is not None:
                    faulty = [row for row in rows if row.error is not None]
                    self.references.add(encode_reference(ChunkReference(*source.mark(), self.hashes[-1], faulty)))
                if not self.is_reference:
                    self.values.add(encode_chunk(rows, kept))
                    self.is_reference = can_refer and transport == "auto" and self.values.num_bytes > MAX_VALUE_BYTES
                    if self.is_reference:
                        self.values.clear()
            self.kept = self.reader.kept.schema()
        except BaseException:
            self.close()
            raise

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(sha256.hex() for sha256 in self.hashes).encode()).hexdigest()

    def close(self) -> None:
        self.values.close()
        self.references.close()


class _ChunkFile:
    """Payloads in a file without a name, or in memory while they are small. Iterating reads them in order."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 (closed by close)
        self._sizes = array("Q")
        self.num_bytes = 0

    def add(self, payload: bytes) -> None:
        try:
            self._file.write(payload)
            self._file.flush()
        except OSError as error:
            folder = tempfile.gettempdir()
            raise OutputError(
                f"the checked rows can't be kept in {folder}: {error.strerror}; set TMPDIR to a folder with more room"
            ) from error
        self._sizes.append(len(payload))
        self.num_bytes += len(payload)

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        for size in self._sizes:
            yield self._file.read(size)

    def clear(self) -> None:
        """Forget all payloads."""
        self._file.seek(0)
        self._file.truncate()
        self._sizes, self.num_bytes = array("Q"), 0

    def close(self) -> None:
        with suppress(OSError):  # the file is closed; what had no room in it isn't wanted any more
            self._file.close()
