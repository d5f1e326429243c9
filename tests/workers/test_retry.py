"""Retry: only failed rows are generated again, the others and their parts stay, and readers never see half of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from minisgl_batch.client import Client
from minisgl_batch.errors import JobStateError, OutputError, OutputTakenError
from minisgl_jobs.dataset import SUCCESS, read_dataset, read_manifest
from minisgl_jobs.model import JobState, RowError, RowResult
from minisgl_jobs.owner import OWNER
from minisgl_jobs.parts import part_name
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.spool import encode_result
from tests.jobs.helpers import expire, wait_for
from tests.workers.delivering import MODEL, Group, part_bytes

FAILING = {1, 2, 9}


def run_partial(api: Client, running: Group, folder: Path, *, n: int = 1) -> str:
    """A job of 12 equal prompts in chunks of 4, of which the rows FAILING have failed."""
    job = api.submit(["same"] * 12, model=MODEL, output=folder, chunk_rows=4, n=n)
    for _ in range(3):
        work = running.take()
        running.run(work, lambda row: row.row_index in FAILING)
        running.commit(work)
    running.end_jobs()
    assert job.status().state is JobState.PARTIAL
    running.ran.clear()
    return job.id


def texts(folder: Path) -> list[str | None]:
    found: list[str | None] = read_dataset(folder)["text"].to_pylist()
    return found


def test_progress_of_a_retry_counts_each_row_once(api: Client, running: Group, tmp_path: Path) -> None:
    """The rows of an opened chunk that were ok stay counted while a worker has the chunk."""
    job = api.job(run_partial(api, running, tmp_path))
    job.retry()
    work = running.take()
    left = running.run_some(work, 1)
    assert job.progress().rows_done == 12 - len(FAILING) + 1
    for row in left:
        running.generate(work, row, 0)
    running.commit(work)


def test_retry_generates_only_the_failed_rows(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.job(run_partial(api, running, tmp_path))
    before = part_bytes(tmp_path)
    old = texts(tmp_path)
    job.retry()
    assert job.status().state is JobState.QUEUED
    assert not (tmp_path / SUCCESS).exists()
    for _ in range(2):
        work = running.take()
        assert job.status().state is JobState.RUNNING
        assert read_dataset(tmp_path).num_rows == 12  # whole at any time
        running.run(work)
        running.commit(work)
    assert running.ran == [(1, 0), (2, 0), (9, 0)]
    running.end_jobs()
    status = job.status()
    assert (status.state, status.rows_ok, status.rows_error) == (JobState.FINISHED, 12, 0)
    assert (tmp_path / SUCCESS).exists()
    assert not (tmp_path / OWNER).exists()
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert (manifest.state, manifest.epoch, manifest.num_ok, manifest.num_errors) == (JobState.FINISHED, 1, 12, 0)
    assert part_bytes(tmp_path)[part_name(1)] == before[part_name(1)]
    assert texts(tmp_path) == ["same 0 in epoch 1" if i in FAILING else old[i] for i in range(12)]


def test_rows_that_fail_again_can_be_retried_again(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.job(run_partial(api, running, tmp_path))
    job.retry()
    for _ in range(2):
        work = running.take()
        running.run(work, lambda row: row.row_index == 9)
        running.commit(work)
    running.end_jobs()
    assert (job.status().state, job.status().rows_error) == (JobState.PARTIAL, 1)
    running.ran.clear()
    job.retry()
    work = running.take()
    running.run(work)
    running.commit(work)
    running.end_jobs()
    assert running.ran == [(9, 0)]
    assert job.status().state is JobState.FINISHED


def test_retry_of_a_row_keeps_its_samples_that_are_ok(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.submit(["a", "b"], model=MODEL, output=tmp_path, n=3)
    work = running.take()
    (part,) = [work.next_part()]
    assert part is not None
    work.start(part)
    for row in part:
        for sample in range(3):
            running.generate(work, row, sample, fails=(row.row_index, sample) == (1, 1))
    running.commit(work)
    running.end_jobs()
    running.ran.clear()
    job.retry()
    work = running.take()
    running.run(work)
    running.commit(work)
    running.end_jobs()
    assert running.ran == [(1, 1)]
    assert job.status().state is JobState.FINISHED


def test_a_lost_row_keeps_its_finished_samples(api: Client, running: Group, tmp_path: Path) -> None:
    api.submit(["a"], model=MODEL, output=tmp_path, n=3)
    work = running.take()
    (part,) = [work.next_part()]
    assert part is not None
    work.start(part)
    running.generate(work, part[0], 1)
    work.fail(part[0], RowError("worker_lost", "as a test wishes"))
    assert work.is_complete
    assert work.count_rows() == (0, 1)
    assert {key: result.status for key, result in work.results.items()} == {
        (0, 0): "error",
        (0, 1): "ok",
        (0, 2): "error",
    }
    running.commit(work)
    running.end_jobs()


def test_a_retry_taken_over_generates_nothing_twice(
    api: Client, client: redis.Redis, running: Group, tmp_path: Path
) -> None:
    job = api.job(run_partial(api, running, tmp_path))
    job.retry()
    lost = running.queue.take()
    assert lost is not None
    running.queue.spool(lost, {(1, 0): encode_result(RowResult(1, text="by the one that died", seed=7))}, num_rows=1)
    expire(client, running.queue, lost)
    for _ in range(2):
        work = running.take()
        running.run(work)
        running.commit(work)
    running.end_jobs()
    assert running.ran == [(2, 0), (9, 0)]
    assert texts(tmp_path)[1] == "by the one that died"
    assert job.status().state is JobState.FINISHED


@pytest.mark.parametrize("damage", ["missing", "damaged", "of other rows"])
def test_a_part_that_can_not_be_kept_is_generated_anew(
    api: Client, running: Group, tmp_path: Path, damage: str
) -> None:
    job = api.job(run_partial(api, running, tmp_path))
    job.retry()
    if damage == "missing":
        (tmp_path / part_name(0)).unlink()
    else:
        other = (tmp_path / part_name(1)).read_bytes()
        # All chunks hold the same prompts, but their rows differ in position.
        (tmp_path / part_name(0)).write_bytes(other if damage == "of other rows" else b"PAR1 damaged")
    for _ in range(2):
        work = running.take()
        running.run(work)
        running.commit(work)
    running.end_jobs()
    assert running.ran == [(0, 0), (1, 0), (2, 0), (3, 0), (9, 0)]
    assert job.status().state is JobState.FINISHED
    assert read_dataset(tmp_path)["row_index"].to_pylist() == list(range(12))


def test_canceling_a_retry_keeps_old_and_new_rows(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.job(run_partial(api, running, tmp_path))
    job.retry()
    work = running.take()
    part = work.next_part()
    assert part is not None
    work.start(part)
    running.generate(work, part[0], 0)
    job.cancel()
    running.give_up(work)
    running.end_jobs()
    status = job.status()
    assert (status.state, status.rows_ok, status.rows_error) == (JobState.CANCELED, 10, 2)
    table = read_dataset(tmp_path)
    assert table["row_index"].to_pylist() == list(range(12))
    failed = table.filter([status == "error" for status in table["status"].to_pylist()])["row_index"].to_pylist()
    assert failed == [2, 9]
    assert table["text"].to_pylist()[1] == "same 0 in epoch 1"
    assert not (tmp_path / SUCCESS).exists()


def test_a_dataset_that_was_overwritten_is_not_retried(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.job(run_partial(api, running, tmp_path))
    other = api.submit(["x"], model=MODEL, output=tmp_path, overwrite=True)
    with pytest.raises(OutputError, match="holds no dataset by now"):
        job.retry()
    work = running.take()
    running.run(work)
    running.commit(work)
    running.end_jobs()
    with pytest.raises(OutputError, match=f"holds the dataset of job {other.id} by now"):
        job.retry()
    assert (job.status().state, other.status().state) == (JobState.PARTIAL, JobState.FINISHED)
    assert (tmp_path / SUCCESS).exists()
    with pytest.raises(JobStateError, match="finished, not partial"):
        other.retry()


def test_nobody_overwrites_the_dataset_of_a_running_retry(api: Client, running: Group, tmp_path: Path) -> None:
    job = api.job(run_partial(api, running, tmp_path))
    job.retry()
    with pytest.raises(OutputTakenError, match=f"the output of job {job.id}, which is queued: cancel it first"):
        api.submit(["x"], model=MODEL, output=tmp_path, overwrite=True)
    job.cancel()
    running.tick()
    running.end_jobs()


# --- one job in a folder ---------------------------------------------------------------------------------------------


def test_a_retry_is_refused_while_a_submit_is_about_to_overwrite_the_dataset(
    api: Client, running: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = api.job(run_partial(api, running, tmp_path))
    refused = []
    append = JobQueue.append

    def retry_and_append(*args: Any) -> None:
        with pytest.raises(OutputError) as caught:
            old.retry()
        refused.append(str(caught.value))
        append(*args)

    monkeypatch.setattr(JobQueue, "append", retry_and_append)
    new = api.submit(["a", "b"], model=MODEL, output=tmp_path, job_id="new", overwrite=True)
    assert refused == [f"{tmp_path} holds the dataset of job new by now, not that of job {old.id}"]
    running.run_all()
    assert (old.status().state, new.status().state) == (JobState.PARTIAL, JobState.FINISHED)
    assert texts(tmp_path) == ["a 0 in epoch 0", "b 0 in epoch 0"]


def test_a_submit_that_fails_before_it_overwrites_leaves_the_dataset(
    api: Client, running: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = api.job(run_partial(api, running, tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(JobQueue, "append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            api.submit(["a"], model=MODEL, output=tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    old.retry()
    running.run_all()
    assert old.status().state is JobState.FINISHED


@pytest.mark.parametrize("moment", ["before its rows are read", "before it is written", "before it is renamed"])
def test_a_job_whose_folder_another_one_has_fails_and_writes_nothing(
    api: Client, running: Group, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = api.submit(["a"], model=MODEL, output=tmp_path)

    def take_folder() -> None:
        (tmp_path / OWNER).write_text("other")

    if moment == "before its rows are read":
        take_folder()
    else:
        work = running.take()
        if moment == "before it is written":
            take_folder()
        else:
            complete = running.queue.complete
            monkeypatch.setattr(running.queue, "complete", lambda *a, **k: (complete(*a, **k), take_folder())[0])
        running.run(work)
    wait_for("its end", lambda: running.tick() or running.end_jobs() or job.status().state.is_final)
    status = job.status()
    assert status.state is JobState.FAILED
    assert status.error == f"{tmp_path} holds the dataset of job other by now, not that of job {job.id}"
    assert running.delivery.works == []
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert visible == [OWNER]
    assert (tmp_path / OWNER).read_text() == "other"
