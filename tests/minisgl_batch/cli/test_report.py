"""What the end of a job tells of its dataset."""

from __future__ import annotations

from pathlib import Path

from minisgl_batch.cli.report import cut_texts
from minisgl_jobs.dataset import make_manifest
from minisgl_jobs.model import JobState, RowError, RowResult
from minisgl_jobs.parts import PartInfo, commit_part, scan_parts, write_part
from minisgl_jobs.results import results_to_table
from tests.jobs.helpers import make_spec


def test_failed_samples_of_a_row_are_no_texts(tmp_path: Path) -> None:
    """One of two rows has failed, in both of its samples."""
    error = RowError("constraint_failed", "why")
    failed = [RowResult(1, sample, status="error", finish_reason="error", error=error) for sample in range(2)]
    results = [RowResult(0, finish_reason="length"), *failed]
    info = PartInfo(job_id="j", chunk=0, epoch=0, input_sha256="", num_rows=len(results))
    write_part(tmp_path, results_to_table(results), info, "t")
    commit_part(tmp_path, 0, 0, "t")
    spec, parts = make_spec(2, 2, job_id="j"), scan_parts(tmp_path)
    manifest = make_manifest(spec, parts, state=JobState.PARTIAL, epoch=0, num_ok=1, num_errors=1)
    assert cut_texts(manifest) == "1 of 1 text ended by max_tokens or with the context"
