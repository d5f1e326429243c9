"""Finalise with real Parquet: renames that were missed, parts that lack, cancellation, retries, repetition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from minisgl_batch.errors import DamagedJobError, JobNotFoundError, OutputError, OutputNotAllowedError
from minisgl_batch.sampling_params import NEUTRAL, SamplingParams
from minisgl_jobs.dataset import MANIFEST, SUCCESS, clear_dataset, read_dataset, read_manifest
from minisgl_jobs.finalise import finalise
from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue, Lease
from minisgl_jobs.model import EngineInfo, JobSpec, JobState, RowError, RowResult
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.owner import OWNER, claim_output
from minisgl_jobs.parts import Part, PartInfo, commit_part, part_name, part_names, scan_parts, write_part
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.results import results_to_table
from minisgl_jobs.roots import AllowedRoots
from minisgl_jobs.spool import encode_result
from tests.jobs.helpers import MODEL, complete, make_spec, submit, taken


class Writer:
    """The part of a worker group that writes."""

    def __init__(self, client: redis.Redis, folder: Path, num_rows: int = 10) -> None:
        self.jobs = JobQueue(client)
        engine: EngineInfo = {"dtype": "float32", "tp": 1, "default_sampling": {"temperature": 0.6}}
        self.chunks = ChunkQueue(client, MODEL, "w1", engine=engine)
        self.outbox = Outbox(client, queue_name(MODEL))
        self.folder = folder / "out"
        self.spec: JobSpec = submit(self.jobs, make_spec(num_rows, 4, output=str(self.folder)))

    def write(self, lease: Lease, errors: int = 0) -> None:
        rows = lease.rows
        results = [
            RowResult(row, status="error", finish_reason="error", error=RowError("odd", "because"))
            if row < rows.start + errors
            else RowResult(row, text=f"row {row} of epoch {lease.epoch}")
            for row in rows
        ]
        info = PartInfo(
            job_id=lease.spec.job_id,
            chunk=lease.chunk,
            epoch=lease.epoch,
            input_sha256="x",
            num_rows=len(rows),
            engines=[self.chunks.engine],
        )
        write_part(self.folder, results_to_table(results), info, lease.token)

    def rename(self, lease: Lease) -> None:
        commit_part(self.folder, lease.chunk, lease.epoch, lease.token)
        self.chunks.renamed([lease])

    def run(self, errors: int = 0, *, renames: bool = True) -> list[Lease]:
        leases = []
        while (lease := self.chunks.take()) is not None:
            self.write(lease, errors)
            complete(self.chunks, lease, errors)
            if renames:
                self.rename(lease)
            leases.append(lease)
        return leases

    def finalise(self) -> JobState | None:
        claim = self.outbox.claim(60)
        assert claim is not None
        return finalise(self.outbox, claim.job_id, claim.epoch)

    @property
    def state(self) -> JobState:
        return self.jobs.status(self.spec.job_id).state


@pytest.fixture
def writer(client: redis.Redis, tmp_path: Path) -> Writer:
    return Writer(client, tmp_path)


def test_a_finished_job_has_manifest_and_success(writer: Writer) -> None:
    writer.run()
    assert writer.finalise() is JobState.FINISHED
    assert writer.state is JobState.FINISHED
    manifest = read_manifest(writer.folder)
    assert manifest is not None
    assert (manifest.state, manifest.num_ok, manifest.num_errors) == (JobState.FINISHED, 10, 0)
    assert manifest.engines == [writer.chunks.engine]
    assert manifest.sampling == writer.spec.params
    assert manifest.effective_sampling == writer.spec.params.over(SamplingParams(temperature=0.6), NEUTRAL)
    assert (writer.folder / SUCCESS).is_file()
    assert read_dataset(writer.folder)["row_index"].to_pylist() == list(range(10))


def test_missed_renames_are_made_up_for_and_leftovers_removed(writer: Writer) -> None:
    leases = writer.run(renames=False)
    commit_part(writer.folder, 1, 0, leases[1].token)  # renamed, but not confirmed
    stray = Lease(writer.spec, 2, "stray", 0, 0, b"", {})
    writer.write(stray)  # of a worker that lost its lease
    assert writer.outbox.load(writer.spec.job_id, 0).renames.keys() == {0, 1, 2}  # type: ignore[union-attr]
    assert writer.finalise() is JobState.FINISHED
    assert sorted(path.name for path in writer.folder.iterdir()) == [
        *(SUCCESS, MANIFEST),
        *map(part_name, range(3)),
    ]
    assert read_dataset(writer.folder).num_rows == 10


@pytest.mark.parametrize(
    ("chunk", "record"),
    [
        ("0", "x/../../secret 0"),
        ("0", ".. 0"),
        ("0", " 0"),
        ("0", "ab"),
        ("0", "ab -1"),
        ("0", "ab " + "9" * 5000),
        ("0", b"\xff\x00 0"),
        ("-1", "ab 0"),
        ("x", "ab 0"),
    ],
)
@pytest.mark.parametrize("is_canceled", [False, True])
def test_a_damaged_record_of_a_rename_ends_the_job_and_moves_nothing(
    writer: Writer, client: redis.Redis, tmp_path: Path, chunk: str, record: str | bytes, is_canceled: bool
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    if is_canceled:
        writer.jobs.cancel(writer.spec.job_id)
    else:
        writer.run(renames=False)
    (writer.folder / ".part-0-000000.x").mkdir(parents=True)  # through it a path with `..` would lead out
    client.hset(writer.outbox._keys.job(writer.spec.job_id, "renames"), chunk, record)
    assert writer.finalise() is (JobState.CANCELED if is_canceled else JobState.FAILED)
    assert secret.read_text() == "mine"
    status = writer.jobs.status(writer.spec.job_id)
    assert ("record in Redis is damaged" in status.error) is not is_canceled
    writer.jobs.purge(writer.spec.job_id)


def test_finalise_makes_no_store_of_a_url_outside_the_roots(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, outbox = JobQueue(client), Outbox(client, queue_name(MODEL))
    job_id = submit(jobs, make_spec(1, 1, output="ftp://127.0.0.1:1/x")).job_id
    jobs.cancel(job_id)
    made: list[str] = []
    monkeypatch.setattr("minisgl_jobs.places.open_store", made.append)
    assert finalise(outbox, job_id, 0, roots=AllowedRoots([str(tmp_path)])) is JobState.CANCELED
    assert "may not be written by this worker" in jobs.status(job_id).error
    assert not made


def test_a_folder_that_leads_out_of_the_roots_by_now_gets_nothing(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First when finalise comes, then once it has read the parts."""
    inside, outside = tmp_path / "in", tmp_path / "outside"
    outside.mkdir()
    writer, roots = Writer(client, inside), AllowedRoots([str(inside)])
    writer.run(renames=False)

    def swap() -> None:
        writer.folder.rename(inside / "kept")
        writer.folder.symlink_to(outside)

    def scan_and_swap(folder: Path) -> list[Part]:
        parts = scan_parts(folder)
        swap()
        return parts

    def refused() -> bool:
        with pytest.raises(OutputNotAllowedError):
            finalise(writer.outbox, writer.spec.job_id, 0, roots=roots)
        return list(outside.iterdir()) == [] and writer.state is JobState.FINALISING

    swap()
    assert refused()
    assert "may not be written by this worker" in writer.jobs.status(writer.spec.job_id).error
    writer.folder.unlink()
    (inside / "kept").rename(writer.folder)
    monkeypatch.setattr("minisgl_jobs.finalise.scan_parts", scan_and_swap)
    assert refused()


def test_damaged_records_of_a_job_that_is_finalised_end_it(writer: Writer, client: redis.Redis) -> None:
    writer.run()
    client.hset(writer.outbox._keys.job(writer.spec.job_id), "engines", "7")
    with pytest.raises(DamagedJobError):
        writer.finalise()
    assert writer.state is JobState.FAILED
    assert writer.outbox.claim(60) is None


def test_finalise_may_be_repeated(writer: Writer) -> None:
    writer.run()
    assert finalise(writer.outbox, writer.spec.job_id, 0) is JobState.FINISHED
    before = (writer.folder / MANIFEST).read_bytes()
    assert finalise(writer.outbox, writer.spec.job_id, 0) is None
    assert (writer.folder / MANIFEST).read_bytes() == before


def test_a_finalise_that_was_overtaken_leaves_the_folder_alone(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pauses, and meanwhile the job has ended, and another one has the folder."""
    writer.run()

    def overtaken(folder: Path) -> list[Part]:
        found = scan_parts(folder)
        with monkeypatch.context() as patch:
            patch.setattr("minisgl_jobs.finalise.scan_parts", scan_parts)
            assert finalise(writer.outbox, writer.spec.job_id, 0) is JobState.FINISHED
        clear_dataset(folder)
        claim_output(folder, "another")
        return found

    monkeypatch.setattr("minisgl_jobs.finalise.scan_parts", overtaken)
    assert finalise(writer.outbox, writer.spec.job_id, 0) is None
    assert [path.name for path in writer.folder.iterdir()] == [OWNER]


def test_finalise_that_died_before_its_last_step_is_repeated(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.run(renames=False)
    with monkeypatch.context() as patch:
        patch.setattr(writer.outbox, "finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            writer.finalise()
    assert writer.state is JobState.FINALISING
    assert finalise(writer.outbox, writer.spec.job_id, 0) is JobState.FINISHED


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_lost_or_damaged_part_fails_the_job_and_says_which(writer: Writer, is_damaged: bool) -> None:
    writer.run(errors=1)
    if is_damaged:
        (writer.folder / part_name(1)).write_bytes(b"PAR1 no more")
    else:
        (writer.folder / part_name(1)).unlink()
    assert writer.finalise() is JobState.FAILED
    status = writer.jobs.status(writer.spec.job_id)
    assert "part-000001.parquet" in status.error
    assert not (writer.folder / SUCCESS).exists()
    manifest = read_manifest(writer.folder)
    assert manifest is not None
    assert manifest.reason is not None
    assert "part-000001.parquet" in manifest.reason
    # Only what is in the folder counts: rows 0 to 3 and 8 to 9, of which the first of each part failed.
    assert (manifest.num_ok, manifest.num_errors) == (status.rows_ok, status.rows_error) == (4, 2)


def test_a_part_that_vanished_before_its_rename_fails_the_job(writer: Writer) -> None:
    leases = writer.run(renames=False)
    for path in writer.folder.glob(f".part-*{leases[2].token}"):
        path.unlink()
    assert writer.finalise() is JobState.FAILED


def test_somebody_elses_parts_fail_the_job(writer: Writer) -> None:
    writer.run()
    writer.write(Lease(make_spec(job_id="other", num_rows=40), 7, "t", 0, 0, b"", {}))
    (writer.folder / ".part-0-000007.t").rename(writer.folder / part_name(7))
    assert writer.finalise() is JobState.FAILED
    assert "another job" in writer.jobs.status(writer.spec.job_id).error


def test_a_folder_that_cannot_be_written_leaves_the_job_to_the_outbox(writer: Writer, tmp_path: Path) -> None:
    writer.run()
    moved = tmp_path / "moved"
    writer.folder.rename(moved)
    writer.folder.write_text("a file is in the way")
    with pytest.raises(OutputError):
        writer.finalise()
    status = writer.jobs.status(writer.spec.job_id)
    assert status.state is JobState.FINALISING
    assert str(writer.folder) in status.error
    writer.folder.unlink()
    moved.rename(writer.folder)
    assert finalise(writer.outbox, writer.spec.job_id, 0) is JobState.FINISHED
    assert writer.jobs.status(writer.spec.job_id).error == ""


def test_a_canceled_job_keeps_its_finished_rows(writer: Writer) -> None:
    first, second = taken(writer.chunks), taken(writer.chunks)
    writer.write(first)
    complete(writer.chunks, first)
    results = {
        (4, 0): RowResult(4, text="kept"),
        (6, 0): RowResult(6, status="error", error=RowError("odd", "because")),
    }
    writer.chunks.spool(second, {sample: encode_result(result) for sample, result in results.items()}, num_rows=1)
    writer.jobs.cancel(writer.spec.job_id)
    writer.chunks.handback([second])
    assert writer.finalise() is JobState.CANCELED
    manifest = read_manifest(writer.folder)
    assert manifest is not None
    assert (manifest.state, manifest.num_ok, manifest.num_errors) == (JobState.CANCELED, 5, 1)
    status = writer.jobs.status(writer.spec.job_id)
    assert (status.rows_ok, status.rows_error) == (5, 1)
    assert not (writer.folder / SUCCESS).exists()
    table = read_dataset(writer.folder)
    assert table["row_index"].to_pylist() == [0, 1, 2, 3, 4, 6]
    assert table["text"].to_pylist()[4] == "kept"


def test_a_job_canceled_before_it_began_has_an_empty_dataset(writer: Writer) -> None:
    writer.jobs.cancel(writer.spec.job_id)
    writer.folder.mkdir()
    assert writer.finalise() is JobState.CANCELED
    assert read_dataset(writer.folder).num_rows == 0


def test_a_job_canceled_before_its_folder_was_made(writer: Writer) -> None:
    writer.jobs.cancel(writer.spec.job_id)
    assert writer.finalise() is JobState.CANCELED
    assert part_names(writer.folder) == []


def test_a_retry_replaces_the_parts_with_error_rows(writer: Writer) -> None:
    writer.write(first := taken(writer.chunks))
    complete(writer.chunks, first)
    writer.rename(first)
    writer.run(errors=2)
    assert writer.finalise() is JobState.PARTIAL
    assert (writer.folder / SUCCESS).is_file()
    writer.jobs.retry(writer.spec.job_id)
    again = writer.run(renames=False)
    assert [lease.chunk for lease in again] == [1, 2]
    assert finalise(writer.outbox, writer.spec.job_id, 0) is None  # a late task of the first epoch
    assert writer.finalise() is JobState.FINISHED
    manifest = read_manifest(writer.folder)
    assert manifest is not None
    assert (manifest.epoch, manifest.num_ok, manifest.num_errors) == (1, 10, 0)
    texts: list[Any] = read_dataset(writer.folder)["text"].to_pylist()
    assert texts == [f"row {row} of epoch {int(row >= 4)}" for row in range(10)]


def test_unknown_jobs_are_said_to_be(writer: Writer) -> None:
    writer.jobs.cancel(writer.spec.job_id)
    with pytest.raises(JobNotFoundError):
        finalise(writer.outbox, "no-such-job", 0)
    assert writer.finalise() is JobState.CANCELED
