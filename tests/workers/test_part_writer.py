"""Parts that can't be written for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minisgl_batch.errors import OutputError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.leases import Lease
from minisgl_jobs.model import JobSpec, Row, RowError
from minisgl_jobs.parts import PartInfo, write_part
from minisgl_jobs.places import Place
from minisgl_jobs.references import ChunkRows
from minisgl_jobs.roots import AllowedRoots
from minisgl_workers import part_writer
from minisgl_workers.part_writer import PartRenamer, PartWriter
from minisgl_workers.work import ChunkWork
from tests.jobs.helpers import wait_for


def complete_chunk(output: Path, job_id: str) -> ChunkWork:
    spec = JobSpec(job_id, "m", num_rows=1, chunk_rows=1, output=str(output), params=SamplingParams())
    lease = Lease(spec, 0, f"token-{job_id}", 0, 1, b"", {})
    return ChunkWork(lease, ChunkRows([Row(0, error=RowError("faulty", "as the test wishes"))], "hash"))


def test_a_folder_that_can_not_be_written_does_not_hold_back_others_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "RETRY_S", 0.05)
    bad, good = complete_chunk(tmp_path / "bad", "bad"), complete_chunk(tmp_path / "good", "good")

    def write(folder: Place, table: pa.Table, info: PartInfo, token: str, **options: Any) -> Place:
        if folder.name == "bad":
            raise OutputError("the bad disk is full")
        return write_part(folder, table, info, token, **options)

    monkeypatch.setattr(part_writer, "write_part", write)
    writer = PartWriter()
    written: list[ChunkWork] = []

    def try_to_write(*works: ChunkWork) -> list[ChunkWork]:
        for work in works:
            writer.write(work)
        written.extend(work for work, _ in writer.written())
        return written

    wait_for("the refusal", lambda: try_to_write(bad) or writer.trouble)
    wait_for("the good one", lambda: try_to_write(bad, good))
    assert written == [good]
    wait_for("another refusal", lambda: try_to_write(bad) and writer.trouble)
    assert writer.trouble == "the bad disk is full"
    writer.drop(bad)
    assert not writer.is_behind
    writer.finish(1)


def test_no_part_is_renamed_in_a_folder_that_leads_out_of_the_roots_by_now(tmp_path: Path) -> None:
    inside, outside, folder = tmp_path / "in", tmp_path / "outside", tmp_path / "in" / "out"
    roots, work = AllowedRoots([str(inside)]), complete_chunk(folder, "j")
    writer, renamer = PartWriter(roots), PartRenamer(roots)
    writer.write(work)
    ((_, pending),) = wait_for("the part", writer.written)
    folder.rename(outside)
    folder.symlink_to(outside)
    renamer.rename(work.lease)
    renamer.finish(60)
    assert renamer.renamed() == []
    assert [path.name for path in outside.iterdir()] == [pending.name]
    writer.finish(1)
