"""The client: jobs from submit to results against a real Redis, with a worker that echoes."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_batch.errors import (
    InvalidInputError,
    InvalidParameterError,
    JobNotFoundError,
    JobStateError,
    JobTimeoutError,
    OutputError,
    RedisFullError,
    RedisUnavailableError,
    UsageError,
)
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.dataset import OWNER, SUCCESS
from minisgl_jobs.job_results import JobResults
from minisgl_jobs.keys import QueueKeys, queue_name
from minisgl_jobs.model import JobState, RowResult
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.reader import JobChanged
from minisgl_jobs.results import result_schema
from minisgl_jobs.row_texts import RowFinished, RowStarted, RowText
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.echo_worker import GROWING, MODEL, EchoWorker
from tests.processes import run_python

DEADLINE_S = 20.0


@pytest.fixture
def api(client: redis.Redis, redis_server: EmbeddedRedis) -> Iterator[Client]:
    """A client of an empty Redis."""
    assert client.dbsize() == 0
    with Client(redis_server.url) as made:
        yield made


@pytest.fixture
def submit(api: Client, tmp_path: Path) -> Callable[..., JobHandle]:
    """Submits prompts to the echo model; the output is `out` in the test's folder."""

    def submit_prompts(prompts: object, **options: object) -> JobHandle:
        return api.submit(prompts, **{"model": MODEL, "output": tmp_path / "out", **options})  # type: ignore[arg-type]

    return submit_prompts


def half_done(job: JobHandle) -> bool:
    return job.status().num_spooled > 0


def texts(results: Iterator[RowResult]) -> dict[int, str]:
    return {result.row_index: result.text for result in results}


def test_from_submit_to_results(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path, rng: random.Random
) -> None:
    prompts = [f"p{rng.random()}" for _ in range(rng.randrange(1, 60))]
    job = submit(prompts, chunk_rows=rng.randrange(1, 20), max_tokens=5, seed=3)
    assert job.status().state is JobState.QUEUED
    with EchoWorker(client):
        ended = job.wait(DEADLINE_S)
    assert (ended.state, ended.rows_ok, ended.rows_error) == (JobState.FINISHED, len(prompts), 0)
    assert ended.spec.params == SamplingParams(max_tokens=5)
    assert [row.text for row in job.rows()] == [f"echo {prompt}" for prompt in prompts]
    table = job.results()
    assert table.schema == result_schema()
    assert table["text"].to_pylist() == [f"echo {prompt}" for prompt in prompts]
    assert SUCCESS in os.listdir(tmp_path / "out")
    progress = job.progress()
    assert (progress.rows_done, progress.num_rows, progress.eta_s) == (len(prompts), len(prompts), None)


def test_sampling_as_params_and_as_fields(submit: Callable[..., JobHandle], api: Client) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=9)
    job = submit(["a"], params=params, max_tokens=2)
    assert job.status().spec.params == SamplingParams(temperature=0.5, max_tokens=2)
    with pytest.raises(InvalidParameterError, match=r"^max_token: is neither"):
        submit(["a"], max_token=2)
    with pytest.raises(InvalidParameterError, match=r"^max_tokens: "):
        submit(["a"], max_tokens=0)
    assert len(api.jobs()) == 1
    api.job(job.id).cancel()


def test_nothing_is_queued_when_a_row_is_faulty(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        submit([{"prompt": "a"}, {"prompt": ""}, {}])
    assert caught.value.num_faults == 2
    assert list(client.scan_iter()) == []
    assert not (tmp_path / "out").exists()


def test_one_job_at_a_time_writes_to_a_folder(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    first = submit(["a"])
    with pytest.raises(OutputError, match=f"the output of job {first.id}, which is another: its rows differ"):
        submit(["b"])
    with pytest.raises(JobStateError, match=f"the output of job {first.id}, which is queued: cancel it first"):
        submit(["b"], overwrite=True)
    first.cancel()
    with EchoWorker(client):
        first.wait(DEADLINE_S)
        # What a job that Redis has lost leaves behind is nobody's.
        (tmp_path / "out" / OWNER).write_text("lost")
        assert submit(["b"], overwrite=True).wait(DEADLINE_S).state is JobState.FINISHED


def test_a_submission_that_fails_leaves_nothing(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RedisFullError("full")

    monkeypatch.setattr(JobQueue, "seal", refuse)
    with pytest.raises(RedisFullError):
        submit(["a"])
    assert os.listdir(tmp_path / "out") == []
    assert [key for key in client.scan_iter() if b":job:" in key] == []


def test_overwriting_removes_the_old_dataset_only_when_the_new_job_is_there(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    with EchoWorker(client):
        submit(["a", "b"], chunk_rows=1).wait(DEADLINE_S)
        with pytest.raises(OutputError, match="--overwrite"):
            submit(["c"])
        with pytest.raises(InvalidInputError):
            submit([{}], overwrite=True)
        assert SUCCESS in os.listdir(tmp_path / "out")
        job = submit(["c"], overwrite=True)
        job.wait(DEADLINE_S)
    assert list(texts(job.rows()).values()) == ["echo c"]
    assert OWNER not in os.listdir(tmp_path / "out")


def test_the_same_job_again_changes_nothing(submit: Callable[..., JobHandle], tmp_path: Path) -> None:
    job = submit(["a"], job_id="mine", seed=1)
    again = submit(["a"], job_id="mine", seed=1, overwrite=True)
    assert again.id == job.id
    assert os.listdir(tmp_path / "out") == [OWNER]
    with pytest.raises(JobStateError, match="job mine exists and is another one"):
        submit(["b"], job_id="mine", seed=1, overwrite=True)
    job.cancel()


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


def test_a_running_job(client: redis.Redis, submit: Callable[..., JobHandle]) -> None:
    with EchoWorker(client, hold=True) as worker:
        job = submit(["a", "b", "c", "d"])
        wait_for("half of the rows", lambda: half_done(job))
        progress = job.progress()
        assert (progress.state, progress.rows_done, progress.num_rows) == (JobState.RUNNING, 2, 4)
        assert (progress.tokens_per_s, progress.cached_share) == (123.0, 0.25)
        assert progress.eta_s is not None
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
    assert job.results().schema == result_schema(token_ids=True)


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


def test_a_table_as_input(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path, rng: random.Random
) -> None:
    num_rows = rng.randrange(1, 2000)
    table = pa.table(
        {
            "prompt": [f"p{i}" for i in range(num_rows)],
            "max_tokens": [None if i % 3 else i + 1 for i in range(num_rows)],
        }
    )
    with EchoWorker(client):
        job = submit(table)
        assert job.wait(DEADLINE_S).state is JobState.FINISHED
        assert job.results()["text"].to_pylist() == [f"echo p{i}" for i in range(num_rows)]
        other = submit(pa.table({"x": ["a"], "id": [7]}), prompt_column="x", keep_columns=["id"], overwrite=True)
        other.wait(DEADLINE_S)
        assert [row.text for row in other.rows()] == ["echo a"]
    with pytest.raises(InvalidInputError):
        submit(pa.table({"prompt": ["a", ""]}), output=tmp_path / "no")
    assert not (tmp_path / "no").exists()


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


def test_jobs_and_workers(client: redis.Redis, api: Client, tmp_path: Path) -> None:
    jobs = [api.submit(["a"], model=model, output=tmp_path / model, seed=0) for model in ("one", "two")]
    assert [job.job_id for job in api.jobs()] == [jobs[1].id, jobs[0].id]
    assert [job.job_id for job in api.jobs(model="one")] == [jobs[0].id]
    assert api.workers() == []
    with EchoWorker(client):
        workers = wait_for("the worker's registration", lambda: api.workers())
        assert [worker.worker_id for worker in workers] == ["echo-1"]
        assert api.workers(model="one") == []
    with pytest.raises(JobNotFoundError, match="no job nothing"):
        api.job("nothing")
    for job in jobs:
        job.cancel()


def test_a_warning_when_nobody_serves_the_model(
    client: redis.Redis, submit: Callable[..., JobHandle], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        job = submit(["a"])
    assert "no worker serves echo now: its jobs wait until one does" in caplog.messages
    assert job.status().waiting == "no worker for echo"
    caplog.clear()
    with EchoWorker(client):
        job.wait(DEADLINE_S)
        submit(["a"], overwrite=True).wait(DEADLINE_S)
        assert caplog.messages == []
        other = submit(["a"], model="other", output=tmp_path / "other")
        assert caplog.messages == ["no worker serves other now: its jobs wait until one does; workers serve echo"]
        other.cancel()


def test_the_url(monkeypatch: pytest.MonkeyPatch, redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    monkeypatch.delenv("MINISGL_REDIS", raising=False)
    with pytest.raises(UsageError, match="set MINISGL_REDIS"):
        Client()
    with pytest.raises(UsageError, match="is not a Redis URL"):
        Client("http://localhost")
    with pytest.raises(RedisUnavailableError, match="can't be reached"):
        Client(f"unix://{tmp_path}/nothing.sock")
    monkeypatch.setenv("MINISGL_REDIS", redis_server.url)
    with Client() as made:
        assert made.workers() == []


def test_the_client_needs_no_torch() -> None:
    program = "import sys, minisgl_batch; minisgl_batch.Client; print('torch' in sys.modules)"
    found = run_python(program)
    assert found == "False\n"


def test_workers_that_may_not_see_the_input_are_named(
    client: redis.Redis,
    api: Client,
    submit: Callable[..., JobHandle],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    with EchoWorker(client):  # on a host called "here"
        wait_for("the worker", api.workers)
        submit(source, transport="value").wait(DEADLINE_S)
        assert "themselves" not in caplog.text
        submit(source, transport="reference", overwrite=True).wait(DEADLINE_S)
    assert f"workers on here read {source} themselves: it must be there, too" in caplog.text
