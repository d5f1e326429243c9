"""Submitting, and finding jobs and workers, against a real Redis, with a worker that echoes."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
import redis

import minisgl_batch
from minisgl_batch.client import Client, JobHandle
from minisgl_batch.client.advice import dropped_tools
from minisgl_batch.errors import (
    InvalidInputError,
    InvalidParameterError,
    JobNotFoundError,
    JobStateError,
    OutputError,
    OutputTakenError,
    RedisFullError,
    RedisUnavailableError,
    UsageError,
)
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.dataset import SUCCESS
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.model import JobState
from minisgl_jobs.owner import OWNER
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.results import result_schema
from minisgl_jobs.status import WorkerInfo
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.client.conftest import DEADLINE_S, texts
from tests.minisgl_batch.echo_worker import EchoWorker
from tests.processes import run_python


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
    with pytest.raises(InvalidParameterError, match=r"^best_of: isn't supported: use n with logprobs"):
        submit(["a"], best_of=2)
    with pytest.raises(InvalidParameterError, match=r"^max_tokens: "):
        submit(["a"], max_tokens=0)
    with pytest.raises(InvalidParameterError, match=r"^keep_columns: must be a list of names: write \['id', 'no'\]"):
        submit([{"prompt": "a", "id": 1, "no": 2}], keep_columns="id, no")
    with pytest.raises(InvalidParameterError, match=r"^keep_columns: must be a list of names, got None"):
        submit(["a"], keep_columns=None)
    with pytest.raises(InvalidParameterError, match=r"^max_token: is no argument of submit.*did you mean max_tokens\?"):
        submit(["a"], max_token=3)
    assert len(api.jobs()) == 1
    api.job(job.id).cancel()


@pytest.mark.parametrize("start_at", ["2026-12-01", 5, datetime.max])
def test_times_that_can_not_be_waited_for(submit: Callable[..., JobHandle], api: Client, start_at: object) -> None:
    with pytest.raises(InvalidParameterError, match=r"^start_at: must be a datetime"):
        submit(["a"], start_at=start_at)
    assert api.jobs() == []


def test_nothing_is_queued_when_a_row_is_faulty(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        submit([{"prompt": "a"}, {"prompt": ""}, {}])
    assert (caught.value.num_faults, len(caught.value.faults)) == (2, 2)
    with pytest.raises(InvalidInputError) as caught:
        submit([{"prompt": "a"}, {"prompt": ""}, {}], max_faults=1)
    assert (caught.value.num_faults, len(caught.value.faults)) == (2, 1)
    assert list(client.scan_iter()) == []
    assert not (tmp_path / "out").exists()


def test_one_job_at_a_time_writes_to_a_folder(
    client: redis.Redis, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    first = submit(["a"])
    with pytest.raises(OutputError, match=f"the output of job {first.id}, which is another: its rows differ"):
        submit(["b"])
    with pytest.raises(OutputTakenError, match=f"the output of job {first.id}, which is queued: cancel it first"):
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
        with pytest.raises(OutputError, match="`overwrite`"):
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


def test_a_warning_when_the_workers_template_drops_tools(
    client: redis.Redis, api: Client, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for model, drops_tools in (("drops/tools", True), ("sees/tools", False)):
        ChunkQueue(client, model, model).heartbeat(WorkerInfo(model, model, drops_tools=drops_tools))
    for number, (model, given, is_told) in enumerate(
        [("drops/tools", tools, True), ("drops/tools", None, False), ("sees/tools", tools, False)]
    ):
        caplog.clear()
        api.submit([chat], model=model, tools=given, output=tmp_path / str(number)).cancel()
        assert [record.message for record in caplog.records] == [dropped_tools(model)] * is_told


def test_a_warning_when_nobody_serves_the_model(
    client: redis.Redis, submit: Callable[..., JobHandle], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def warnings() -> list[str]:
        return [record.message for record in caplog.records if record.levelno >= logging.WARNING]

    job = submit(["a"])
    assert "no worker serves echo now: its jobs wait until one does" in warnings()
    assert job.status().waiting == "no worker for echo"
    caplog.clear()
    with EchoWorker(client):
        job.wait(DEADLINE_S)
        submit(["a"], overwrite=True).wait(DEADLINE_S)
        assert warnings() == []
        other = submit(["a"], model="other", output=tmp_path / "other")
        assert warnings() == ["no worker serves other now: its jobs wait until one does; workers serve echo"]
        other.cancel()
        caplog.clear()
        mistyped = submit(["a"], model="Ech", output=tmp_path / "mistyped")
        assert warnings()[0].endswith("; workers serve echo; did you mean echo?")
        mistyped.cancel()


def test_the_url(monkeypatch: pytest.MonkeyPatch, redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    monkeypatch.delenv("MINISGL_REDIS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(RedisUnavailableError, match=r"start a worker.*set MINISGL_REDIS"):
        Client()
    with EmbeddedRedis.shared() as own, Client() as made, Client(own.url) as same:
        job = made.submit(["a"], model="m", output=tmp_path / "o")
        assert [found.job_id for found in same.jobs()] == [job.id]
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


def test_what_is_loaded_late_is_listed_all_the_same() -> None:
    assert set(minisgl_batch.__all__) <= set(dir(minisgl_batch))
