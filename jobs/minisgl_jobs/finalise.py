"""Finalise: the last renames, the check of the parts, manifest, `_SUCCESS` and the job's last state.

May run twice, at any time and anywhere: each step finds what is done already. Knows nothing of RQ. Called by `tasks`.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable

import pyarrow as pa

from minisgl_batch.errors import (
    DamagedJobError,
    InputUnreachableError,
    OutputDamagedError,
    OutputDeniedError,
    OutputError,
    OutputLostError,
    OutputNotAllowedError,
)
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.words import count
from minisgl_jobs.dataset import Manifest, check_dataset, finish_dataset, make_manifest, missing_chunks
from minisgl_jobs.kept import add_columns, columns_of
from minisgl_jobs.model import JobSpec, JobState, RowResult
from minisgl_jobs.outbox import FinalisingJob, Outbox
from minisgl_jobs.parts import (
    Part,
    PartInfo,
    commit_part,
    distinct,
    num_ok,
    output_place,
    part_name,
    pending_name,
    read_part,
    read_part_table,
    remove_leftovers,
    scan_parts,
    write_part,
)
from minisgl_jobs.places import Place, make_folder
from minisgl_jobs.references import ChunkReader, ChunkRows
from minisgl_jobs.results import results_to_table, samples_of, table_to_results
from minisgl_jobs.roots import AllowedRoots
from minisgl_jobs.spool import decode_result

logger = logging.getLogger(__name__)


def finalise(outbox: Outbox, job_id: str, epoch: int, *, roots: AllowedRoots | None = None) -> JobState | None:
    """Bring a job whose chunks are all committed, or which was canceled, to its last state.

    Args:
        roots: what inputs and outputs may be used; by default all.

    Returns:
        That state, or None when this epoch of the job was finalised before.

    Raises:
        JobNotFoundError: there is no such job (any more).
        OutputError: the output can't be written or read at the moment. The job's status says so, and the outbox tries
            again; but a canceled job without finished rows ends where its output can't be.
    """
    job = outbox.load(job_id, epoch)
    if job is None:
        return None
    roots = roots or AllowedRoots()
    try:
        folder = output_place(job.spec.output, roots)
        _make_folder(folder)
        check_dataset(folder, job_id)
        damage = _rename_committed(job, folder, roots)
        if job.is_canceled:
            _write_left_over(outbox, job, folder, roots)
        manifest = _manifest(job, folder, damage)
        if outbox.load(job_id, epoch) is None:
            return None  # somebody else was faster: what is in the folder may be a retry's or another job's by now
        roots.check_writing(folder)
        check_dataset(folder, job_id)
        finish_dataset(folder, manifest)
        remove_leftovers(folder, epoch)
    except OutputLostError as error:
        outbox.finish(job_id, epoch, JobState.FAILED, error=str(error))
        logger.error("job %s is failed: %s", job_id, error)
        return JobState.FAILED
    except OutputError as error:
        if isinstance(error, (OutputDeniedError, OutputNotAllowedError)) and _left_nothing(outbox, job):
            outbox.finish(job_id, epoch, JobState.CANCELED, error=f"canceled, without a dataset: {error}")
            return JobState.CANCELED
        outbox.note_error(job_id, epoch, str(error))
        raise
    rows = None if manifest.state.is_complete else (manifest.num_ok, manifest.num_errors)
    outbox.finish(job_id, epoch, manifest.state, error=manifest.reason or "", rows=rows)
    logger.info(
        "job %s is %s: %s ok, %d failed",
        *(job_id, manifest.state.value, count(manifest.num_ok, "row"), manifest.num_errors),
    )
    return manifest.state


def _left_nothing(outbox: Outbox, job: FinalisingJob) -> bool:
    """Whether a job was canceled before any row was finished: where its output can't be, it ends all the same."""
    has_rows = job.num_done or job.renames or any(outbox.spooled(job.spec.job_id, chunk) for chunk in job.left_over)
    return job.is_canceled and not has_rows and job.epoch == 0


def _make_folder(folder: Place) -> None:
    """There is none yet when a job was canceled before its first part."""
    try:
        make_folder(folder)
    except OSError as error:
        raise OutputError(f"{folder} can't be made: {error.strerror}") from error


def _rename_committed(job: FinalisingJob, folder: Place, roots: AllowedRoots) -> str:
    """Do the renames that the workers that committed these parts didn't live to do.

    Returns:
        What is wrong with those that can't be done ever, "" if nothing is.
    """
    damage = ""
    for chunk, (token, epoch) in job.renames.items():
        try:
            pending = folder / pending_name(chunk, epoch, token)
        except DamagedJobError as error:
            damage = str(error)
            continue
        if pending.exists():
            commit_part(folder, chunk, epoch, token, roots=roots)
    return damage


def _write_left_over(outbox: Outbox, job: FinalisingJob, folder: Place, roots: AllowedRoots) -> None:
    """Save the finished rows of chunks that a canceled job didn't finish, in a retry beside the old ones."""
    for chunk in job.left_over:
        before = _part_before(folder / part_name(chunk))
        rows, kept, sha256 = job.spec.chunk_range(chunk), None, ""
        results = {key: decode_result(data) for key, data in outbox.spooled(job.spec.job_id, chunk).items()}
        engines = job.engines if results else []
        if before is not None and before[0].epoch == job.epoch:
            continue  # this was done before
        if before is None and not results:
            continue
        found = _read_input(outbox, job, chunk, roots)
        if before is not None:
            info, part = before
            sha256, engines = info.input_sha256, [*info.engines, *engines]
            old = table_to_results(part)
            results = {(result.row_index, result.sample_index): result for result in old} | results
            kept = columns_of(part, rows, job.spec.kept)
        elif found is not None:
            kept, sha256 = found.kept, found.sha256
        table = results_to_table(results.values(), job.spec.optional_columns)
        table = add_columns(table, kept, rows.start, job.spec.kept)
        info = PartInfo(
            job_id=job.spec.job_id,
            chunk=chunk,
            epoch=job.epoch,
            input_sha256=sha256,
            num_rows=table.num_rows,
            is_whole=False,
            num_ok=_count_ok(results.values(), found, job.spec.params),
            engines=distinct(engines),
        )
        token = f"finalise-{secrets.token_hex(8)}"  # in place of a lease's; another finalise may be at the same
        write_part(folder, table, info, token, roots=roots)
        commit_part(folder, chunk, job.epoch, token, roots=roots)


def _part_before(path: Place) -> tuple[PartInfo, pa.Table] | None:
    """What is there of a chunk; None for nothing, and where it is damaged."""
    if not path.exists():
        return None
    try:
        return read_part(path).info, read_part_table(path)
    except OutputDamagedError as error:
        logger.warning("its rows are lost: %s", error)
        return None


def _read_input(outbox: Outbox, job: FinalisingJob, chunk: int, roots: AllowedRoots) -> ChunkRows | None:
    """A chunk's rows; None where they can't be read: the job is over all the same."""
    reader = ChunkReader(roots)
    try:
        return reader.read(job.spec, chunk, outbox.payload(job.spec.job_id, chunk))
    except InputUnreachableError as error:
        logger.warning("columns of the input may be null in %s: %s", part_name(chunk), error)
        return None
    finally:
        reader.close()


def _count_ok(results: Iterable[RowResult], found: ChunkRows | None, params: SamplingParams) -> int:
    """The rows all of whose samples are there without an error; where the rows can't be read, by the job's `n`."""
    num_samples = {row.row_index: samples_of(row, params) for row in found.rows} if found is not None else {}
    num_there = Counter(result.row_index for result in results if result.status == "ok")
    return sum(num >= num_samples.get(row, params.n or 1) for row, num in num_there.items())


def _manifest(job: FinalisingJob, folder: Place, damage: str) -> Manifest:
    parts = scan_parts(folder)
    state, reason = _outcome(job, parts, damage)
    rows_ok, rows_error = job.rows_ok, job.rows_error
    if not state.is_complete:
        ours = [part for part in parts if part.info.job_id == job.spec.job_id]
        parts, rows_ok, rows_error = _whats_there(folder, job.spec, ours)
    return make_manifest(
        job.spec,
        parts,
        state=state,
        epoch=job.epoch,
        num_ok=rows_ok,
        num_errors=rows_error,
        reason=reason,
    )


def _whats_there(folder: Place, spec: JobSpec, parts: list[Part]) -> tuple[list[Part], int, int]:
    """The parts of an incomplete job that can be read, and their rows that are ok and not.

    From the parts: the queue counts lost chunks, too.
    """
    rows_ok, rows_error, there = 0, 0, []
    for part in parts:
        try:
            read_part_table(folder / part.name, ["row_index", "status"])
        except OutputDamagedError as error:
            logger.warning("its rows are lost: %s", error)
            continue
        there.append(part)
        rows_error += part.info.num_failed
        rows_ok += num_ok(part.info, spec.chunk_range(part.info.chunk))
    return there, rows_ok, rows_error


def _outcome(job: FinalisingJob, parts: list[Part], damage: str) -> tuple[JobState, str | None]:
    if job.is_canceled:
        return JobState.CANCELED, job.cancel_reason or None
    if damage:
        return JobState.FAILED, damage
    foreign = [part.name for part in parts if part.info.job_id != job.spec.job_id]
    if foreign:
        return JobState.FAILED, f"{job.spec.output} holds parts of another job, such as {foreign[0]}"
    epochs = {part.info.chunk: part.info.epoch for part in parts}
    vanished = {chunk for chunk, (_, epoch) in job.renames.items() if epochs.get(chunk) != epoch}
    missing = sorted(vanished.union(missing_chunks(job.spec, parts)))
    if missing:
        first = part_name(missing[0])
        return JobState.FAILED, f"{job.spec.output} lacks {count(len(missing), 'committed part')}, the first is {first}"
    return (JobState.PARTIAL if job.rows_error else JobState.FINISHED), None
