"""A job from the outside: wait, stream, results, retry and cancel, against a real Redis, with a worker that echoes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_batch.client.progress import measure
from minisgl_batch.errors import (
    JobStateError,
    JobTimeoutError,
    OutputError,
    RedisUnavailableError,
    UsageError,
)
from minisgl_jobs.dataset import SUCCESS
from minisgl_jobs.folder_lock import lock_folder
from minisgl_jobs.job_results import JobResults
from minisgl_jobs.keys import QueueKeys, queue_name
from minisgl_jobs.model import JobState
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import JobChanged
from minisgl_jobs.results import result_schema
from minisgl_jobs.row_texts import RowFinished, RowStarted, RowText
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.client.conftest import DEADLINE_S, half_done, texts
from tests.minisgl_batch.echo_worker import GROWING, MODEL, EchoWorker


def test_error_rows_make_a_job_partial_and_can_be_retried(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job = submit(["a", "fail", "b", "c"], chunk_rows=2)
        assert job.wait(DEADLINE_S).state is JobState.PARTIAL
    results = list(job.rows())
    assert [result.status for result in results] == ["ok", "error", "ok", "ok"]
    assert results[1].error is not None
    assert results[1].error.type == "refused"
    job.retry()
    assert job.status().state is JobState.QUEUED
    assert SUCCESS not in os.listdir(tmp_path / "out")
    # The old error row doesn't count while it is tried again.
    assert list(texts(job.rows(partial=True))) == [0, 2, 3]
    with EchoWorker(client):
        assert job.wait(DEADLINE_S).state is JobState.PARTIAL
    assert SUCCESS in os.listdir(tmp_path / "out")


def test_retry_of_a_job_that_is_not_partial(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job = submit(["a"])
        job.wait(DEADLINE_S)
    with pytest.raises(JobStateError, match="finished, not partial"):
        job.retry()
    assert SUCCESS in os.listdir(tmp_path / "out")


def test_nothing_is_done_to_the_folder_of_a_run(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    """A run goes on with a partial dataset under the name of its job, which another Redis has, too."""
    with EchoWorker(client):
        job = submit(["a", "fail"])
        job.wait(DEADLINE_S)
    found = sorted(os.listdir(tmp_path / "out"))
    for change in (job.retry, lambda: job.purge(output=True)):
        with lock_folder(tmp_path / "out", alone=True), pytest.raises(OutputError, match="another run writes to"):
            change()
        assert job.status().state is JobState.PARTIAL
        assert sorted(os.listdir(tmp_path / "out")) == found


def test_a_running_job(client: redis.Redis, submit: Callable[..., JobHandle]) -> None:
    with EchoWorker(client, hold=True) as worker:
        job = submit(["a", "b", "c", "d"])
        wait_for("half of the rows", lambda: half_done(job))
        progress = job.progress()
        assert (progress.state, progress.rows_done, progress.num_rows) == (JobState.RUNNING, 2, 4)
        assert (progress.tokens_per_s, progress.cached_share) == (123.0, 0.25)
        assert progress.eta_s is not None
        left_alone = replace(progress.status, num_workers=0)  # with rows that are done, and no end in sight
        assert measure(left_alone, ()).eta_s is None
        with pytest.raises(JobStateError, match="is running: wait for its end, or ask for partial results"):
            job.results()
        assert texts(job.rows(partial=True)) == {0: "echo a", 1: "echo b"}
        with pytest.raises(JobTimeoutError, match=r"still running after 0\.05 s"):
            job.wait(0.05)
        worker.go_on.set()
        assert job.wait(DEADLINE_S).state is JobState.FINISHED


def test_cancel_keeps_finished_rows(client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path) -> None:
    with EchoWorker(client, hold=True):
        job = submit(["a", "b", "c", "d"])
        wait_for("half of the rows", lambda: half_done(job))
        job.cancel()
        assert job.wait(DEADLINE_S).state is JobState.CANCELED
    assert texts(job.rows()) == {0: "echo a", 1: "echo b"}
    assert SUCCESS not in os.listdir(tmp_path / "out")
    job.cancel()
    with pytest.raises(JobStateError, match="canceled, not partial"):
        job.retry()


def test_a_reader_that_has_left_leaves_nothing_in_a_canceled_job(
    client: redis.Redis, submit: Callable[..., JobHandle]
) -> None:
    job = submit(["a"])
    watch = QueueKeys(queue_name(MODEL)).job(job.id, "watch")
    events = job.stream()
    assert next(events) == JobChanged(JobState.QUEUED)
    job.cancel()
    assert client.pttl(watch) > 0  # type: ignore[operator]
    with EchoWorker(client):
        assert list(events)[-1] == JobChanged(JobState.CANCELED)


def test_results_of_a_job_that_had_none(client: redis.Redis, submit: Callable[..., JobHandle]) -> None:
    job = submit(["a"], token_ids=True)
    job.cancel()
    with EchoWorker(client):
        job.wait(DEADLINE_S)
    assert job.results().num_rows == 0
    assert job.results().schema == result_schema({"output_token_ids"})


def test_every_token_once_for_early_and_late_readers(client: redis.Redis, submit: Callable[..., JobHandle]) -> None:
    with EchoWorker(client, hold=True) as worker:
        job = submit(["a", "b", "fail", "d"], chunk_rows=2)
        wait_for("half of the rows", lambda: half_done(job))
        seen: list[object] = []
        reader = threading.Thread(target=lambda: seen.extend(job.stream()), daemon=True)
        reader.start()
        wait_for("a row to grow", lambda: any(isinstance(e, RowText) and e.text == GROWING for e in seen))
        worker.go_on.set()
        job.wait(DEADLINE_S)
        reader.join(DEADLINE_S)
    for events in (seen, list(job.stream())):
        last: dict[int, str] = {}
        finished: dict[int, str] = {}
        for event in events:
            if isinstance(event, RowStarted):
                last[event.row_index] = ""
            elif isinstance(event, RowText):
                last[event.row_index] += event.text
            elif isinstance(event, RowFinished):
                assert event.row_index not in finished
                finished[event.row_index] = event.status
        assert finished == {0: "ok", 1: "ok", 2: "error", 3: "ok"}
        assert last == {0: "echo a", 1: "echo b", 2: "", 3: "echo d"}
        assert events[-1] == JobChanged(JobState.PARTIAL)


def test_stream_of_one_row(client: redis.Redis, submit: Callable[..., JobHandle]) -> None:
    with EchoWorker(client):
        job = submit([{"prompt": "a"}, {"prompt": "b", "n": 2, "custom_id": "named"}])
        job.wait(DEADLINE_S)
    events = [event for event in job.stream([1]) if not isinstance(event, JobChanged)]
    assert {(event.row_index, event.sample_index) for event in events} == {(1, 0), (1, 1)}
    assert [event.custom_id for event in events if isinstance(event, RowFinished)] == ["named", "named"]
    assert [(row.custom_id, row.metadata) for row in job.rows()] == [(None, None), ("named", None), ("named", None)]
    with pytest.raises(UsageError, match="has no row 2: its rows are 0 to 1"):
        job.stream([2])


def test_finished_rows_are_fetched_by_ranges(
    client: redis.Redis, submit: Callable[..., JobHandle], rng: random.Random
) -> None:
    num_rows = rng.randrange(1, 80)
    with EchoWorker(client):
        job = submit([f"p{i}" for i in range(num_rows)], chunk_rows=rng.randrange(1, 20))
        job.wait(DEADLINE_S)
    bounds = sorted(rng.sample(range(num_rows + 1), min(num_rows + 1, 2 * rng.randrange(1, 5))))
    ranges = [range(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=False)]
    found = texts(JobResults(JobQueue(client), job.id).fetch(ranges))
    assert found == {row: f"echo p{row}" for span in ranges for row in span}


def test_results_on_a_machine_without_the_folder(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job = submit(["a"])
        job.wait(DEADLINE_S)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    for read in (job.results, lambda: list(job.stream())):
        with pytest.raises(OutputError, match="isn't here: it was moved or removed"):
            read()


def test_results_are_never_those_of_a_job_that_has_overwritten_them(
    client: redis.Redis, submit: Callable[..., JobHandle]
) -> None:
    with EchoWorker(client):
        first = submit(["a"])
        first.wait(DEADLINE_S)
    second = submit(["b"], overwrite=True)
    for _ in range(2):  # while the other one waits, and when it has ended
        for read in (first.results, lambda: list(first.rows()), lambda: list(first.stream())):
            with pytest.raises(OutputError, match=f"holds the dataset of job {second.id} by now"):
                read()
        with EchoWorker(client):
            second.wait(DEADLINE_S)
    assert texts(second.rows()) == {0: "echo b"}


def test_notebooks_show_jobs_as_tables(api: Client, submit: Callable[..., JobHandle], tmp_path: Path) -> None:
    job = submit(["a"], model="<b>m</b>")
    shown = job._repr_html_()
    assert shown.startswith("<table>")
    for text in (job.id, "queued (waiting)", "0/1", "&lt;b&gt;m&lt;/b&gt;"):
        assert text in shown
    assert "<b>m" not in api.overview()._repr_html_()
    assert repr(job) == f"JobHandle({job.id!r})"
    job.cancel()
    job.purge(output=True)
    assert "no job" in job._repr_html_()
    assert not (tmp_path / "out").exists()


def test_waiting_with_a_progress_bar(
    client: redis.Redis, submit: Callable[..., JobHandle], capsys: pytest.CaptureFixture[str]
) -> None:
    with EchoWorker(client):
        job = submit(["a", "fail"])
        assert job.wait(DEADLINE_S, show=True).state is JobState.PARTIAL
    assert "partial" in capsys.readouterr().out


def test_a_wait_keeps_its_time_while_redis_is_away(
    submit: Callable[..., JobHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(["a"])

    def fail(*_: object) -> None:
        raise RedisUnavailableError("Redis is away")

    with monkeypatch.context() as patch:
        patch.setattr(JobQueue, "status", fail)
        with pytest.raises(JobTimeoutError, match="is still not known after"):
            job.wait(0.05)
    job.cancel()
