"""Writes the Parquet parts of a dataset so that a crash at any moment leaves whole parts only, wherever that is.

A part is written under a hidden name that holds epoch, chunk and lease token, and synced; once the queue has committed
the chunk it is renamed to its final name. So a worker that lost its lease can't put its file over a committed one.
Object stores have no rename: there the store copies the object, which appears whole, and the old one is removed.
Knows nothing of Redis. Called by frontends (write, commit) and finalise (commit, scan, clean-up).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from minisgl_batch.errors import DamagedJobError, OutputDamagedError, OutputDeniedError, OutputError, UsageError
from minisgl_jobs.model import SCHEMA_VERSION, EngineInfo
from minisgl_jobs.places import Place, RemotePath, list_names, make_folder, move, num_bytes, place, remove, write_whole
from minisgl_jobs.roots import AllowedRoots

logger = logging.getLogger(__name__)

PART_PATTERN = re.compile(r"part-(\d{6,})\.parquet")
PENDING_PATTERN = re.compile(r"\.part-(\d+)-(\d+)\.(.+)")
_TOKEN = re.compile(r"[0-9a-z-]{1,64}")  # of a lease, or finalise's own
TOKEN_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_METADATA_KEY = b"minisgl_batch"
_REMOTE_READERS = 16  # footers of parts in an object store that are read at once
_DENIED = (PermissionError, NotADirectoryError, FileExistsError)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LOW_CARDINALITY = ["status", "finish_reason", "stop_reason", "error_type", "model"]


class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a part's file metadata says, as JSON under the key "minisgl_batch".

    Attributes:
        job_id, chunk, epoch: whose results these are.
        input_sha256: `chunk_sha256` of the rows they answer; resume goes by it.
        num_rows: result rows in the part.
        num_failed: input rows with an error among them.
        num_cut: result rows that ended for their length.
        num_by_error_type: result rows with an error, by its type; "unknown" in parts from before these counts.
        is_whole: whether all rows of the chunk are there, as they are not where a job was canceled.
        num_ok: of a part that isn't whole, the input rows without an error all of whose samples are there.
        prompt_tokens, cached_tokens, completion_tokens: of all of them together.
        engines: what has generated its rows: one, or more where an engine went on with what another one had begun.
        schema_version: of the columns.
    """

    job_id: str
    chunk: int
    epoch: int
    input_sha256: str
    num_rows: int
    num_failed: int = 0
    num_cut: int = 0
    num_by_error_type: dict[str, int] = {}
    is_whole: bool = True
    num_ok: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engines: list[EngineInfo] = []
    schema_version: int = SCHEMA_VERSION


class Part(msgspec.Struct, frozen=True):
    """A committed part: its file's name and size in bytes, and what the file says of itself."""

    name: str
    num_bytes: int
    info: PartInfo


def distinct(engines: Iterable[EngineInfo]) -> list[EngineInfo]:
    """Each once, in the order of their first."""
    found: list[EngineInfo] = []
    for engine in engines:
        if engine not in found:
            found.append(engine)
    return found


def num_ok(info: PartInfo, rows: range) -> int:
    """How many of a chunk's rows are finished without an error in its part."""
    return len(rows) - info.num_failed if info.is_whole else info.num_ok


def part_name(chunk: int) -> str:
    """The final name of a chunk's part; up to a million parts sort as their numbers do."""
    return f"part-{chunk:06d}.parquet"


def pending_name(chunk: int, epoch: int, token: str) -> str:
    """The name of a part until its chunk is committed; dataset readers pass over names with a leading dot.

    Raises:
        DamagedJobError: these are none of ours. They may come from Redis, and must not lead out of the folder.
    """
    if chunk < 0 or epoch < 0 or not _TOKEN.fullmatch(token):
        raise DamagedJobError(f"a part's record in Redis is damaged: chunk {chunk}, epoch {epoch}, token {token!r:.80}")
    return f".part-{epoch}-{chunk:06d}.{token}"


def write_part(
    folder: Place, table: pa.Table, info: PartInfo, token: str, *, roots: AllowedRoots | None = None
) -> Place:
    """Write a part under its pending name; on return it is on disk. The folder is made if it isn't there.

    The counts of tokens, failed and cut rows in `info` are taken from the table.

    Args:
        roots: what may be written, looked at once more when all is ready; by default everything.

    Raises:
        OutputNotAllowedError: the folder leads out of the roots by now; nothing is written.
        OutputError: the disk is full, or the folder can't be written (OutputDeniedError: not from here); nothing is
            left behind.
        ValueError: `info.num_rows` isn't the table's; a defect of the caller.
    """
    if info.num_rows != table.num_rows:
        raise ValueError(f"part {info.chunk} says {info.num_rows} rows and holds {table.num_rows}")
    path = folder / pending_name(info.chunk, info.epoch, token)
    described = table.replace_schema_metadata({_METADATA_KEY: msgspec.json.encode(_counted(info, table))})
    with _writing(path, table.nbytes):
        make_folder(folder)
        sink = pa.BufferOutputStream()
        pq.write_table(described, sink, compression="zstd", use_dictionary=_LOW_CARDINALITY)
        if roots is not None:
            roots.check_writing(folder)
        write_whole(path, sink.getvalue())
    return path


def _counted(info: PartInfo, table: pa.Table) -> PartInfo:
    """With the counts that the table gives."""
    failed = table.filter(pc.equal(table["status"], "error"))
    return msgspec.structs.replace(
        info,
        num_failed=pc.count_distinct(failed["row_index"]).as_py(),
        num_cut=pc.sum(pc.equal(table["finish_reason"], "length")).as_py() or 0,
        num_by_error_type=Counter(failed["error_type"].to_pylist()),
        **{name: pc.sum(table[name]).as_py() or 0 for name in TOKEN_COUNTS},
    )


def commit_part(folder: Place, chunk: int, epoch: int, token: str, *, roots: AllowedRoots | None = None) -> Place:
    """Give a part its final name, in place of one of an earlier epoch; done already is fine.

    Args:
        roots: as in `write_part`.

    Raises:
        OutputNotAllowedError: the folder leads out of the roots by now.
        OutputError: there is no such part, or the folder can't be written.
    """
    pending, final = folder / pending_name(chunk, epoch, token), folder / part_name(chunk)
    if roots is not None:
        roots.check_writing(folder)
    with _writing(final, 0):
        try:
            move(pending, final)
        except FileNotFoundError:
            if not final.exists() or read_part(final).info.epoch != epoch:
                raise OutputError(f"{pending} has vanished: was the output folder changed while the job ran?") from None
    return final


def read_part(path: Place) -> Part:
    """What a part's footer says.

    Raises:
        OutputError: the file can't be read. OutputDamagedError: it is damaged, or isn't the part that its name says.
    """
    try:
        with _parquet_source(path) as source:
            metadata = pq.read_metadata(source).metadata or {}
        info = msgspec.json.decode(metadata[_METADATA_KEY], type=PartInfo)
        if path.name != part_name(info.chunk):
            raise OutputDamagedError(f"{path} is a copy of {part_name(info.chunk)}: remove it")
        if info.num_failed and not info.num_by_error_type:
            info = msgspec.structs.replace(info, num_by_error_type={"unknown": info.num_failed})
        return Part(path.name, num_bytes(path), info)
    except (OSError, pa.ArrowException, KeyError, msgspec.DecodeError) as error:
        raise _reading_error(error)(f"{path} isn't a whole part of a dataset: {error}") from error


def read_part_table(path: Place, columns: Sequence[str] | None = None) -> pa.Table:
    """A part's results.

    Raises:
        OutputError: the file can't be read. OutputDamagedError: it is damaged.
    """
    try:
        with _parquet_source(path) as source, pq.ParquetFile(source) as file:
            table = file.read(columns=None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as error:
        raise _reading_error(error)(f"{path} can't be read: {error}") from error
    return table.replace_schema_metadata(None)


def scan_parts(folder: Place) -> list[Part]:
    """The committed parts of a folder in chunk order, none if there is no such folder; damaged ones count as missing.

    Raises:
        OutputError: the folder or a part can't be read.
    """
    paths = [folder / name for name in part_names(folder)]
    if not isinstance(folder, RemotePath):
        return [part for path in paths if (part := _undamaged(path)) is not None]
    with ThreadPoolExecutor(_REMOTE_READERS, thread_name_prefix="parts") as readers:
        return [part for part in readers.map(_undamaged, paths) if part is not None]


def part_names(folder: Place) -> list[str]:
    """The names of the committed parts of a folder in chunk order."""
    chunks = {name: int(match[1]) for name in list_folder(folder) if (match := PART_PATTERN.fullmatch(name))}
    return sorted(chunks, key=chunks.__getitem__)


def remove_leftovers(folder: Place, epoch: int) -> int:
    """Remove pending parts of this and earlier epochs, once every committed one has its final name.

    Answers how many there were. A later epoch's are somebody's work.

    Raises:
        OutputError: the folder can't be read or written.
    """
    stale = [
        folder / name
        for name in list_folder(folder)
        if (match := PENDING_PATTERN.fullmatch(name)) and int(match[1]) <= epoch and not is_folder(folder / name)
    ]
    for path in stale:
        remove_file(path)
    return len(stale)


def is_folder(path: Place) -> bool:
    """Whether this is a folder, whatever its name: parts are files, and stores have no others."""
    return not isinstance(path, RemotePath) and os.path.isdir(path)


def list_folder(folder: Place) -> list[str]:
    """The names in a folder, none if there is no such folder.

    Raises:
        OutputError: it isn't a folder or can't be read.
    """
    try:
        return list_names(folder)
    except OSError as error:
        raise OutputError(f"{folder} can't be read: {error.strerror}") from error


def remove_file(path: Place) -> None:
    """Remove a file that may be gone already.

    Raises:
        OutputError: it can't be removed.
    """
    with _writing(path, 0):
        remove(path)


def write_file(path: Place, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all, also after a power loss.

    Raises:
        OutputError: the disk is full, or the folder can't be written.
    """
    pending = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    with _writing(path, len(content)):
        write_whole(path, content, pending=pending)


def output_place(output: str, roots: AllowedRoots | None = None) -> Place:
    """Where a job's output is.

    Args:
        roots: what may be written; by default everything. With some a local folder comes without symbolic links, so
            that it doesn't matter where these lead later on.

    Raises:
        OutputDeniedError: nothing installed here reads or writes such a URL.
        OutputNotAllowedError: it isn't under the roots. No store was made of such a URL.
    """
    if roots is not None:
        roots.check_writing(output)
    try:
        folder = place(output)
    except UsageError as error:
        raise OutputDeniedError(str(error)) from None
    if roots is None or not roots.is_confined or isinstance(folder, RemotePath):
        return folder
    folder = folder.resolve()
    roots.check_writing(folder)
    return folder


def _undamaged(path: Place) -> Part | None:
    try:
        return read_part(path)
    except OutputDamagedError as error:
        logger.warning("it counts as missing: %s", error)
        return None


def _reading_error(error: Exception) -> type[OutputError]:
    """What it means that a part can't be read: Arrow's own errors about contents have no number of the system's."""
    is_access = isinstance(error, OSError) and error.errno is not None
    return OutputError if is_access else OutputDamagedError


def _parquet_source(path: Place) -> Any:
    """What pyarrow reads a file from; use as a context manager."""
    return path.open() if isinstance(path, RemotePath) else nullcontext(str(path))


@contextmanager
def _writing(path: Place, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_denied = isinstance(error, _DENIED) or error.errno == errno.EROFS
        raise (OutputDeniedError if is_denied else OutputError)(
            f"{path} can't be written: {error.strerror or error}{_free_space(error, path, num_bytes)}"
        ) from error


def _free_space(error: OSError, path: Place, num_bytes: int) -> str:
    """What there is and what it takes, when room is what is lacking."""
    if isinstance(path, RemotePath):
        return ""
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return ""
    if free > 2 * num_bytes and error.errno not in _NO_ROOM:
        return ""
    return f" ({free >> 10} KiB are free; up to {-(-num_bytes >> 10)} KiB are needed)"
