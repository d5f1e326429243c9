"""Finalise: the last renames, the check of the parts, manifest, `_SUCCESS` and the job's last state.

May run twice, at any time and anywhere: each step finds what is done already. Knows nothing of RQ. Called by `tasks`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from minisgl_batch.errors import OutputError
from minisgl_jobs.dataset import Manifest, finish_dataset, make_manifest, missing_chunks
from minisgl_jobs.model import JobState
from minisgl_jobs.outbox import FinalisingJob, Outbox
from minisgl_jobs.parts import (
    Part,
    PartInfo,
    commit_part,
    part_name,
    pending_name,
    remove_leftovers,
    scan_parts,
    write_part,
)
from minisgl_jobs.results import results_to_table
from minisgl_jobs.spool import decode_result

logger = logging.getLogger(__name__)

LEFT_OVER_TOKEN = "canceled"
"""Stands for the lease's token in the names of parts that finalise writes itself."""


def finalise(outbox: Outbox, job_id: str, epoch: int) -> JobState | None:
    """Bring a job whose chunks are all committed, or which was canceled, to its last state.

    Returns:
        That state, or None when this epoch of the job was finalised before.

    Raises:
        JobNotFoundError: there is no such job (any more).
        OutputError: the output can't be written or read at the moment. The job's status says so, and the outbox tries
            again.
    """
    job = outbox.load(job_id, epoch)
    if job is None:
        return None
    folder = Path(job.spec.output)
    try:
        _make_folder(folder)
        _rename_committed(job, folder)
        rows_ok, rows_error = _write_left_over(outbox, job, folder) if job.is_canceled else (0, 0)
        manifest = _manifest(job, scan_parts(folder), job.rows_ok + rows_ok, job.rows_error + rows_error)
        finish_dataset(folder, manifest)
        remove_leftovers(folder, epoch)
    except OutputError as error:
        outbox.note_error(job_id, epoch, str(error))
        raise
    outbox.finish(job_id, epoch, manifest.state, error=manifest.reason or "")
    logger.info(
        "job %s is %s: %d rows ok, %d errors", job_id, manifest.state.value, manifest.num_ok, manifest.num_errors
    )
    return manifest.state


def _make_folder(folder: Path) -> None:
    """There is none yet when a job was canceled before its first part."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} can't be made: {error.strerror}") from error


def _rename_committed(job: FinalisingJob, folder: Path) -> None:
    """Do the renames that the workers that committed these parts didn't live to do."""
    for chunk, (token, epoch) in job.renames.items():
        if (folder / pending_name(chunk, epoch, token)).exists():
            commit_part(folder, chunk, epoch, token)


def _write_left_over(outbox: Outbox, job: FinalisingJob, folder: Path) -> tuple[int, int]:
    """Save the finished rows of chunks that a canceled job didn't finish; tells how many are ok and not."""
    rows_ok = rows_error = 0
    for chunk in job.left_over:
        results = [decode_result(data) for data in outbox.spooled(job.spec.job_id, chunk).values()]
        if not results or (folder / part_name(chunk)).exists():
            continue
        table = results_to_table(results, token_ids=job.spec.token_ids)
        # No hash of the input: a later job that resumes must not take the chunk for whole.
        info = PartInfo(job_id=job.spec.job_id, chunk=chunk, epoch=job.epoch, input_sha256="", num_rows=table.num_rows)
        write_part(folder, table, info, LEFT_OVER_TOKEN)
        commit_part(folder, chunk, job.epoch, LEFT_OVER_TOKEN)
        faulty = {result.row_index for result in results if result.status == "error"}
        rows_error += len(faulty)
        rows_ok += len({result.row_index for result in results} - faulty)
    return rows_ok, rows_error


def _manifest(job: FinalisingJob, parts: list[Part], rows_ok: int, rows_error: int) -> Manifest:
    state, reason = _outcome(job, parts)
    return make_manifest(
        job.spec,
        [part for part in parts if part.info.job_id == job.spec.job_id] if reason else parts,
        state=state,
        epoch=job.epoch,
        num_ok=rows_ok,
        num_errors=rows_error,
        engine=dict(job.engine),
        reason=reason,
    )


def _outcome(job: FinalisingJob, parts: list[Part]) -> tuple[JobState, str | None]:
    if job.is_canceled:
        return JobState.CANCELED, None
    foreign = [part.name for part in parts if part.info.job_id != job.spec.job_id]
    if foreign:
        return JobState.FAILED, f"{job.spec.output} holds parts of another job, such as {foreign[0]}"
    epochs = {part.info.chunk: part.info.epoch for part in parts}
    vanished = {chunk for chunk, (_, epoch) in job.renames.items() if epochs.get(chunk) != epoch}
    missing = sorted(vanished.union(missing_chunks(job.spec, parts)))
    if missing:
        first = part_name(missing[0])
        return JobState.FAILED, f"{job.spec.output} lacks {len(missing)} committed parts, the first is {first}"
    return (JobState.PARTIAL if job.rows_error else JobState.FINISHED), None
