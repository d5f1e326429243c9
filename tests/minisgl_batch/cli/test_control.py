"""`retry`, `pause`, `resume`, `purge`, `cancel --wait` and held jobs: what they change and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import click
import pytest
import redis

from minisgl_batch.cli.times import parse_duration, parse_moment
from minisgl_batch.client import Client
from minisgl_jobs.dataset import SUCCESS
from minisgl_jobs.model import JobState
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import RunCli, write_rows
from tests.minisgl_batch.echo_worker import MODEL, EchoWorker


def state(job_id: str) -> JobState:
    with Client() as api:
        return api.job(job_id).status().state


def test_retry(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path) -> None:
    job_id = submit(["a", "fail", "b"])
    with EchoWorker(client), Client() as api:
        api.job(job_id).wait(20)
    result = run_cli("retry", job_id, "--json")
    assert f"1 row of job {job_id} queued again" in result.stderr
    assert json.loads(result.stdout)["state"] == "queued"
    assert not (tmp_path / "out" / SUCCESS).exists()
    assert "is queued, not partial" in run_cli("retry", job_id, code=1).stderr
    assert "to the same output with --retry-failed" in run_cli("retry", "out", code=3).stderr
    with EchoWorker(client):
        assert json.loads(run_cli("status", job_id, "--json").stdout)["num_rows"] == 3
        with Client() as api:
            api.job(job_id).wait(20)
        result = run_cli("retry", job_id, "--wait", code=1)
    assert "partial: 2 rows ok, 1 failed" in result.stderr
    assert f"to run it again: minisgl-batch retry {job_id}\n" in result.stderr
    assert "tokens generated in all" in result.stderr  # no rate: most are from before
    assert (tmp_path / "out" / SUCCESS).exists()


def test_no_retry_is_offered_to_rows_at_fault(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    again = ("submit", tmp_path / "in.jsonl", "--model", MODEL, "-o", tmp_path / "out", "--on-error", "record")
    with EchoWorker(client):
        for rows, is_offered in ((["a", {"prompt": 5}], False), (["a", {"prompt": 5}, "fail"], True)):
            write_rows(tmp_path / "in.jsonl", rows)
            first = run_cli(*again, "--overwrite", "--wait", code=1)
            assert ("again: minisgl-batch retry" in first.stderr) == is_offered
            second = run_cli(*again)
            assert f"{len(rows) - 1} of them failed" in second.stderr
            assert ("to run those again" in second.stderr) == is_offered
            assert "--truncate" not in first.stderr


def test_pause_and_resume(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    job_id = submit(["a"])
    assert json.loads(run_cli("pause", MODEL, "--json").stdout) == {"model": MODEL, "paused": True}
    assert "waiting    the queue is paused" in run_cli("status", job_id).stdout
    with EchoWorker(client):
        wait_for("the worker", lambda: MODEL in run_cli("workers").stdout)
        assert state(job_id) is JobState.QUEUED
        assert "runs again" in run_cli("resume", MODEL).stderr
        with Client() as api:
            assert api.job(job_id).wait(20).state is JobState.FINISHED
    result = run_cli("resume", MODEL, "--json")
    assert result.stderr == f"{MODEL} wasn't paused\n"
    assert json.loads(result.stdout) == {"model": MODEL, "paused": False}
    assert "warning: no job or worker of ☃ {x} was seen yet" in run_cli("pause", "☃ {x}").stderr
    run_cli("resume", "☃ {x}")


def test_purge(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path) -> None:
    with EchoWorker(client):
        first, second, third = (
            submit(["a"], "--wait", "-o", tmp_path / name, "--job-id", name) for name in ("one", "two", "three")
        )
    (tmp_path / "two" / "mine.txt").touch()
    assert json.loads(run_cli("purge", first, first, "--json").stdout) == [first]
    assert (tmp_path / "one" / SUCCESS).exists()
    assert "no job one" in run_cli("purge", second, first, code=3).stderr
    assert state(second) is JobState.FINISHED
    run_cli("purge", second, "--output")
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["mine.txt"]
    assert json.loads(run_cli("purge", "--finished", "--older-than", "1d", "--json").stdout) == []
    assert json.loads(run_cli("purge", "--finished", "--model", "other", "--json").stdout) == []
    running = submit(["a"], "--job-id", "running")
    assert "cancel it before it is purged" in run_cli("purge", running, code=1).stderr
    assert json.loads(run_cli("purge", "--finished", "--json").stdout) == [third]
    assert [job for job in run_cli("jobs", "--json").stdout.split('"') if job in (first, second, third)] == []
    run_cli("cancel", running)
    run_cli("purge", running, "--output")
    assert not (tmp_path / "out").exists()
    assert [key for key in client.scan_iter() if b":job:" in key] == []
    for wrong in ((), ("x", "--finished"), ("x", "--model", "m"), ("--finished", "--output")):
        run_cli("purge", *wrong, code=2)


def test_purge_removes_no_dataset_of_another_job(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        first = submit(["a"], "--wait")
        submit(["b"], "--wait", "--overwrite")
    assert "holds the dataset of job" in run_cli("purge", first, "--output", code=1).stderr
    assert "generated from" not in run_cli("status", first).stdout  # tokens of the other dataset
    assert (tmp_path / "out" / SUCCESS).exists()
    (tmp_path / "out").rename(tmp_path / "gone")
    assert "isn't on this machine" in run_cli("purge", first, "--output", code=1).stderr
    run_cli("purge", first)


def test_cancel_of_an_unserved_job(run_cli: RunCli, submit: Callable[..., str]) -> None:
    job_id = submit(["a"])
    result = run_cli("cancel", job_id, "--wait", "--json")
    assert json.loads(result.stdout)["state"] == "canceled"
    assert f"job {job_id} is canceled" in result.stderr
    assert json.loads(run_cli("cancel", job_id, "--json").stdout)["state"] == "canceled"


def test_jobs_after_jobs(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path) -> None:
    first = submit(["a"], "--job-id", "first")
    options = ("-o", tmp_path / "2", "--job-id", "second", "--after", first, "--json")
    assert json.loads(submit(["b"], *options))["waiting"] == "the end of job first"
    assert "waiting    the end of job first" in run_cli("status", "second").stdout
    assert json.loads(run_cli("status", "second", "--json").stdout)["after"] == first
    with EchoWorker(client):
        assert "second  finished" in _when_done(run_cli, "second")
    assert (
        "no job nothing"
        in run_cli("submit", tmp_path / "in.jsonl", "--model", "m", "--after", "nothing", code=3).stderr
    )


def _when_done(run_cli: RunCli, job_id: str) -> str:
    with Client() as api:
        api.job(job_id).wait(20)
    return run_cli("jobs").stdout


def test_jobs_at_a_time(run_cli: RunCli, submit: Callable[..., str]) -> None:
    record = json.loads(submit(["a"], "--at", "2099-12-01T08:00", "--json"))
    assert record["waiting"] == "its time, 2099-12-01 08:00:00"
    found = json.loads(run_cli("status", record["job_id"], "--json").stdout)
    assert found["start_at"] == datetime(2099, 12, 1, 8).timestamp()
    assert (found["state"], found["after"]) == ("queued", None)
    run_cli("cancel", record["job_id"])
    assert run_cli("submit", "in.jsonl", "--model", "m", "--at", "soon", code=2).stderr.count("is not a time") == 1


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("1.5 h", 5400), ("90m", 5400), ("2d", 172800), ("0s", 0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "-1h", "1y", "1e3s", "٣s", "9999999w", "nan s", "+1h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_duration(text)


def test_moments() -> None:
    now = datetime.now().astimezone()
    assert parse_moment("2026-12-01T08:00+02:00").isoformat().startswith("2026-12-01T")
    assert parse_moment("2026-12-01T06:00Z") == parse_moment("2026-12-01T08:00+02:00")
    assert parse_moment("2026-12-01").tzinfo is not None
    for text in ("2h", "+2h", "120m"):  # as durations are written elsewhere
        assert timedelta(hours=2) <= parse_moment(text) - now < timedelta(hours=2, minutes=1)
    assert timedelta(0) < parse_moment("08:00") - now <= timedelta(days=1, hours=1)


@pytest.mark.parametrize("text", ["", "soon", "25:00", "-1", "2026-13-01", "+", "+1", "99999-01-01T00:00", "１２:００"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_moment(text)
