"""A dataset as a folder: parts, `_manifest.json` and, when every row is there, `_SUCCESS`; `_JOB` until its job ends.

Data tools pass over names with a leading underscore or dot, so the folder can be read as it is by anything that reads
Parquet. Knows nothing of Redis. Called by finalise (finish), submit (check and clear) and readers of results.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone

import msgspec
import pyarrow as pa

from minisgl_batch._version import __version__
from minisgl_batch.errors import (
    InvalidParameterError,
    OutputError,
    OutputLostError,
    OutputTakenError,
    SchemaVersionError,
)
from minisgl_batch.sampling_params import NEUTRAL, SamplingParams
from minisgl_batch.words import count
from minisgl_jobs.kept import column_types
from minisgl_jobs.model import SCHEMA_VERSION, EngineInfo, InputInfo, JobSpec, JobState, decode_record
from minisgl_jobs.owner import ASIDE, OWNER, claim_output, output_owner, release_output
from minisgl_jobs.parts import (
    PART_PATTERN,
    PENDING_PATTERN,
    TOKEN_COUNTS,
    Part,
    distinct,
    is_folder,
    list_folder,
    part_name,
    part_names,
    read_part_table,
    remove_file,
    write_file,
)
from minisgl_jobs.places import Place, RemotePath
from minisgl_jobs.results import result_schema

logger = logging.getLogger(__name__)

MANIFEST = "_manifest.json"
SUCCESS = "_SUCCESS"
DEFAULT_SAMPLING = "default_sampling"  # among what an engine says of itself
HIDDEN = ("_", ".")  # data tools pass over names that begin so


class ManifestPart(msgspec.Struct, frozen=True):
    """A part: file name, result rows, size, and `chunk_sha256` of the rows it answers."""

    name: str
    num_rows: int
    num_bytes: int
    input_sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a dataset is and how it was made.

    Attributes:
        schema_version: of this record and of the columns.
        release: the minisgl-batch version that wrote it.
        job_id, model, num_rows, chunk_rows, seed, sampling, system, input, submitted_at: the job as it was submitted.
        effective_sampling: of rows that say nothing themselves: `sampling` over what the model recommends and our own
            defaults; None where engines differ in what the model does, or don't tell it.
        state: the job's final state; the dataset is complete if that is finished or partial.
        reason: why a failed job failed.
        epoch: 0, and one more for each retry.
        num_ok, num_errors: rows by outcome.
        num_cut: texts that ended for their length, by `max_tokens` or the context.
        num_by_error_type: results with an error, by its type; a row with several samples may have as many.
        prompt_tokens, cached_tokens, completion_tokens: of all results; cached ones are among the prompts'.
        finished_at: when the last part was there.
        chat: as in `JobSpec`.
        rows_sha256, token_ids: as in `JobSpec`; a job that goes on with this dataset must have the same.
        kept_columns: columns of the input that are copied, and their types; the same holds.
        engines: what has generated the rows, in the order of the parts; each part names its own in its metadata.
        parts: in chunk order.
    """

    schema_version: int = SCHEMA_VERSION
    release: str = __version__
    job_id: str
    state: JobState
    reason: str | None = None
    epoch: int
    model: str
    num_rows: int
    num_ok: int
    num_errors: int
    num_cut: int = 0
    num_by_error_type: dict[str, int] = {}
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seed: int
    sampling: SamplingParams
    effective_sampling: SamplingParams | None = None
    system: str | None
    input: InputInfo
    engines: list[EngineInfo] = []
    submitted_at: datetime
    finished_at: datetime
    chunk_rows: int
    chat: bool = False
    rows_sha256: str = ""
    token_ids: bool = False
    kept_columns: dict[str, str] = {}
    parts: list[ManifestPart]

    @property
    def is_complete(self) -> bool:
        return self.state.is_complete


def make_manifest(
    spec: JobSpec,
    parts: Sequence[Part],
    *,
    state: JobState,
    epoch: int,
    num_ok: int,
    num_errors: int,
    reason: str | None = None,
) -> Manifest:
    """The manifest of a job that has just ended with `parts`.

    Raises:
        OutputError: the job is said to be complete, and a part is missing or another job's.
    """
    engines = distinct(engine for part in parts for engine in part.info.engines)
    manifest = Manifest(
        job_id=spec.job_id,
        state=state,
        reason=reason,
        epoch=epoch,
        model=spec.model,
        num_rows=spec.num_rows,
        num_ok=num_ok,
        num_errors=num_errors,
        num_cut=sum(part.info.num_cut for part in parts),
        num_by_error_type=sum((Counter(part.info.num_by_error_type) for part in parts), Counter()),
        **{name: sum(getattr(part.info, name) for part in parts) for name in TOKEN_COUNTS},
        seed=spec.seed,
        sampling=spec.params,
        effective_sampling=_effective_sampling(spec.params, engines),
        system=spec.system,
        input=spec.input,
        engines=engines,
        submitted_at=datetime.fromtimestamp(spec.submitted_at, timezone.utc),
        finished_at=datetime.now(timezone.utc),
        chunk_rows=spec.chunk_rows,
        chat=spec.chat,
        rows_sha256=spec.rows_sha256,
        token_ids=spec.token_ids,
        kept_columns=column_types(spec.kept),
        parts=[ManifestPart(p.name, p.info.num_rows, p.num_bytes, p.info.input_sha256) for p in parts],
    )
    foreign = [part.name for part in parts if part.info.job_id != spec.job_id]
    if foreign:
        raise OutputError(f"{spec.output} holds parts of another job, such as {foreign[0]}")
    if manifest.is_complete and (missing := missing_chunks(spec, parts)):
        raise OutputError(f"{spec.output} lacks {count(len(missing), 'part')}, the first is {part_name(missing[0])}")
    return manifest


def _effective_sampling(params: SamplingParams, engines: Sequence[EngineInfo]) -> SamplingParams | None:
    """A job's sampling over what its engines say of the model's recommendation, as `Manifest` has it."""
    recommended = [engine.get(DEFAULT_SAMPLING) for engine in engines]
    if not recommended or recommended.count(recommended[0]) < len(recommended):
        return None
    try:
        return params.over(msgspec.convert(recommended[0], SamplingParams), NEUTRAL)
    except (msgspec.ValidationError, InvalidParameterError):  # anybody may have put it into Redis
        return None


def missing_chunks(spec: JobSpec, parts: Iterable[Part]) -> list[int]:
    """The chunks of a job that have no part yet."""
    there = {part.info.chunk for part in parts}
    return [chunk for chunk in range(spec.num_chunks) if chunk not in there]


def finish_dataset(folder: Place, manifest: Manifest) -> None:
    """Write the manifest and, if the dataset is complete, `_SUCCESS`; the job lets the folder go. May be repeated.

    Raises:
        OutputError: the folder can't be written.
    """
    if not manifest.is_complete:
        remove_file(folder / SUCCESS)
    write_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    if manifest.is_complete:
        write_file(folder / SUCCESS, b"")
    release_output(folder, manifest.job_id)


def reopen_resumed(folder: Place) -> None:
    """Take `_SUCCESS` and the manifest away before a job goes on with what is in its folder, which it has claimed.

    Raises:
        OutputError: the folder can't be written.
    """
    for name in (SUCCESS, MANIFEST):
        remove_file(folder / name)


def reopen_dataset(folder: Place, job_id: str) -> None:
    """Make a folder a job's output again and take `_SUCCESS` away, before its error rows are tried again.

    Raises:
        OutputError: the folder holds another dataset by now, or it can't be written.
    """
    if read_manifest(folder) is None:
        raise OutputError(f"{folder} holds no dataset by now: job {job_id} can't be retried")
    check_dataset(folder, job_id)
    claim_output(folder, job_id)
    remove_file(folder / SUCCESS)


def read_manifest(folder: Place) -> Manifest | None:
    """The manifest, None while the job runs.

    Raises:
        OutputError: it can't be read or is damaged.
        SchemaVersionError: another release wrote it.
    """
    path = folder / MANIFEST
    try:
        return decode_record(path.read_bytes(), Manifest, str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise OutputError(f"{path} can't be read: {error}") from error


def manifest_of(folder: Place, job_id: str) -> Manifest | None:
    """A job's manifest; None while it runs, and when the folder holds another's by now. Errors as `read_manifest`."""
    manifest = read_manifest(folder)
    return manifest if manifest is not None and manifest.job_id == job_id else None


def dataset_job(folder: Place) -> str:
    """The job whose output or dataset this is, "" where nothing says so.

    Raises:
        OutputError: the folder can't be read, or its manifest is damaged.
    """
    owner = output_owner(folder)
    if owner:
        return owner
    manifest = read_manifest(folder)
    return manifest.job_id if manifest is not None else ""


def check_dataset(folder: Place, job_id: str) -> None:
    """Make sure that a folder's dataset isn't another job's, which has overwritten it.

    Raises:
        OutputLostError: it is. OutputError: as `dataset_job`.
    """
    try:
        found = dataset_job(folder)
    except SchemaVersionError as error:
        raise OutputLostError(f"{folder} doesn't hold the dataset of job {job_id}: {error}") from error
    if found not in ("", job_id):
        raise OutputLostError(f"{folder} holds the dataset of job {found} by now, not that of job {job_id}")


def read_batches(folder: Place, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The results in row order, a part at a time: those that the manifest names or, while the job runs, those there.

    Raises:
        OutputError: there is no dataset, or a part is missing or damaged.
    """
    manifest = read_manifest(folder)
    names = part_names(folder) if manifest is None else [part.name for part in manifest.parts]
    if manifest is None and not names:
        raise OutputError(f"{folder} holds no results yet" if folder.is_dir() else f"{folder}: there is no such folder")
    for name in names:
        yield from read_part_table(folder / name, columns).to_batches()


def read_dataset(folder: Place, columns: Sequence[str] | None = None) -> pa.Table:
    """The same as one table; with no parts (a job canceled at once), an empty one.

    Raises:
        OutputError: there is no dataset, or a part is missing or damaged.
    """
    batches = list(read_batches(folder, columns))
    if batches:
        return pa.Table.from_batches(batches)
    empty = result_schema().empty_table()
    return empty if columns is None else empty.select(list(columns))


def check_output(folder: Place, *, job_id: str = "", overwrite: bool = False) -> None:
    """Make sure that a new job may write here: a folder that is absent or holds no dataset. Nothing is changed.

    Warns of other files and folders, on which plain readers of the dataset fail or which they take for a part of it.

    With `overwrite`, a dataset of ours may be there, for `clear_dataset` to remove. Without it, what the unfinished job
    `job_id` has put there may: it is submitted once more by a client that doesn't know how far it came.

    Raises:
        OutputTakenError: a dataset or somebody's Parquet files are there. OutputError: the folder can't be written.
    """
    names = list_folder(folder)
    foreign = [name for name in names if not name.startswith(HIDDEN) and not PART_PATTERN.fullmatch(name)]
    parquet = [name for name in foreign if name.endswith(".parquet")]
    if parquet:
        raise OutputTakenError(
            f"{folder} holds Parquet files that aren't ours, such as {parquet[0]}: choose another folder"
        )
    owner = output_owner(folder)
    if not overwrite and (not owner or owner != job_id) and any(_is_ours(name) for name in names):
        what = "a dataset" if MANIFEST in names else "parts of a job that isn't finished"
        if owner:
            what = f"the output of job {owner}, which hasn't ended"
        raise OutputTakenError(f"{folder} holds {what}: choose another folder, or overwrite it with `overwrite`")
    if foreign:
        logger.warning(
            "%s holds other things, such as %s, which break tools that read it as a whole (pandas.read_parquet): "
            "choose another folder, or move them away",
            folder,
            foreign[0],
        )
    if isinstance(folder, RemotePath):
        return  # who may write there shows when the folder is claimed
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} can't be written: {existing} is not a folder that you may write to")


def clear_dataset(folder: Place, *, keep: str = "") -> None:
    """Remove a dataset's files; other files stay. `_SUCCESS` and the manifest go first, so no half looks whole.

    Args:
        keep: a file that stays, too: OWNER, where a job clears its folder for itself.

    Raises:
        OutputError: the folder can't be written.
    """
    found = (name for name in list_folder(folder) if _is_ours(name) and name != keep)
    ours = sorted(found, key=lambda name: (name != SUCCESS, name != MANIFEST))
    for path in (folder / name for name in ours):
        if not is_folder(path):
            remove_file(path)


def remove_dataset(folder: Place, job_id: str) -> None:
    """Remove a job's dataset, and the folder if nothing else is in it; there may be none.

    Raises:
        OutputError: the folder holds another dataset, or can't be written.
    """
    check_dataset(folder, job_id)
    if read_manifest(folder) is None and part_names(folder):
        raise OutputError(f"{folder} holds parts of a job that isn't finished, not the dataset of job {job_id}")
    clear_dataset(folder)
    with suppress(OSError):  # it isn't there, or others' files are in it
        folder.rmdir()


def _is_ours(name: str) -> bool:
    unfinished = name.startswith((f".{MANIFEST}.", f".{SUCCESS}.", ASIDE))
    is_part = any(pattern.fullmatch(name) for pattern in (PART_PATTERN, PENDING_PATTERN))
    return unfinished or is_part or name in (MANIFEST, SUCCESS, OWNER)
