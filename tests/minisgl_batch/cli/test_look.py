"""`status`, `jobs`, `workers` and `cancel`: what is going on, for people and for scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from minisgl_batch.client import Client
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.model import JobState
from tests.jobs.helpers import expire, taken, wait_for
from tests.minisgl_batch.cli.conftest import RunCli, end, write_rows
from tests.minisgl_batch.echo_worker import MODEL, EchoWorker


def fields(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines())  # type: ignore[arg-type]


def half_done(job_id: str) -> bool:
    with Client() as api:
        return api.job(job_id).status().num_spooled > 0


def test_a_job_from_waiting_to_finished(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    job_id = submit(["a", "b", "c", "d"])
    waiting = fields(run_cli("status", job_id).stdout)
    assert (waiting["state"], waiting["waiting"]) == ("queued", "no worker for echo")
    assert json.loads(run_cli("status", job_id, "--json").stdout)["waiting"] == "no worker for echo"
    assert "queued (waiting)" in run_cli("jobs").stdout

    with EchoWorker(client, hold=True) as worker:
        wait_for("half of the rows", lambda: half_done(job_id))
        running = fields(run_cli("status", job_id).stdout)
        assert running["state"] == "running"
        assert running["rows"] == "2 of 4 done, 2 of them in unfinished chunks"
        assert running["tokens"] == "123/s, 25% of prompts cached"
        assert running["workers"] == "echo-1 (chunk 0)"
        assert "left" in running
        assert run_cli("jobs").stdout.splitlines()[1].split()[3] == "2/4"  # counted as by `status`
        assert json.loads(run_cli("jobs", "--json").stdout)[0]["rows_done"] == 2
        assert "waiting" not in running
        record = json.loads(run_cli("status", job_id, "--json").stdout)
        assert (record["rows_done"], record["rows_ok"], record["results_spooled"]) == (2, 0, 2)
        assert (record["tokens_per_s"], record["cached_share"], record["tokens"]) == (123.0, 0.25, None)
        worker.go_on.set()
        with Client() as api:
            api.job(job_id).wait(20)

    finished = fields(run_cli("status", job_id).stdout)
    assert (finished["state"], finished["rows"]) == ("finished", "4 of 4 done")
    assert finished["tokens"] == "24 generated from 40 of prompts (50% cached)"
    assert finished["output"] == str(tmp_path / "out")
    record = json.loads(run_cli("status", job_id, "--json").stdout)
    assert record["tokens"] == {"prompt_tokens": 40, "cached_tokens": 20, "completion_tokens": 24}
    assert record["cached_share"] == 0.5
    assert record["tokens_per_s"] == pytest.approx(24 / max(record["finished_at"] - record["started_at"], 1e-3))
    assert record["finished_at"] >= record["started_at"] >= record["queued_at"] >= record["created_at"]


def test_chunks_whose_worker_was_lost_are_counted(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]
) -> None:
    """Chunks, not workers: one that dies may have had several."""
    job_id = submit([str(row) for row in range(4)], "--chunk-rows", 1)
    assert "recovered" not in fields(run_cli("status", job_id).stdout)
    dead, alive = ChunkQueue(client, MODEL, "dead"), ChunkQueue(client, MODEL, "alive")
    for lease in [taken(dead) for _ in range(3)]:
        expire(client, dead, lease)
    again = [taken(alive) for _ in range(3)]
    assert fields(run_cli("status", job_id).stdout)["recovered"] == "3 chunks whose worker was lost"
    alive.handback(again)
    end(client, job_id)


def test_texts_that_were_cut_are_counted(
    run_cli: RunCli, client: redis.Redis, tmp_path: Path, submit: Callable[..., str]
) -> None:
    source = write_rows(tmp_path / "cut.jsonl", [{"prompt": "a", "max_tokens": 9}, "b", "c"])
    options = ("--max-tokens", 1, "--structured-outputs", '{"json_object": true}', "-o", tmp_path / "cut", "--wait")
    with EchoWorker(client):
        result = run_cli("submit", source, "--model", MODEL, *options)
        whole = submit(["a"], "--wait")
    cut = "2 of 3 texts ended by max_tokens or with the context; as structured outputs these aren't complete"
    assert cut in result.stderr
    job_id = result.stdout.strip()
    assert fields(run_cli("status", job_id).stdout)["cut"] == cut
    assert json.loads(run_cli("status", job_id, "--json").stdout)["texts_cut"] == 2
    assert "cut" not in fields(run_cli("status", whole).stdout)


def test_what_an_ended_job_tells_scripts(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    """Failed rows hold no texts, and `submit --wait --json` tells what `status --json` does."""
    source = write_rows(tmp_path / "cut.jsonl", ["a", {"prompt": "b", "max_tokens": 9}, "fail c"])
    options = ("--max-tokens", 1, "-o", tmp_path / "cut", "--wait", "--json")
    with EchoWorker(client):
        result = run_cli("submit", source, "--model", MODEL, *options, code=1)
    assert "1 of 2 texts ended by max_tokens" in result.stderr
    record = json.loads(result.stdout)
    seen = json.loads(run_cli("status", record["job_id"], "--json").stdout)
    assert record == {name: seen[name] for name in record}
    assert record["texts_cut"] == 1
    assert record["tokens"]["completion_tokens"] > 0


def test_a_job_whose_manifest_can_not_be_read(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    (tmp_path / "out" / "_manifest.json").write_text("{")
    result = run_cli("status", job_id)
    assert fields(result.stdout)["state"] == "finished"
    assert "_manifest.json can't be read" in result.stderr
    assert json.loads(run_cli("status", job_id, "--json").stdout)["tokens"] is None


def test_the_list_of_jobs(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    empty = run_cli("jobs")
    assert (empty.stdout, empty.stderr) == ("", "no jobs (finished ones expire after a week)\n")
    assert run_cli("jobs", "--json").stdout == "[]\n"
    with EchoWorker(client):
        first = submit(["a", "fail"])
        with Client() as api:
            api.job(first).wait(20)
        second = submit(["a"], "--overwrite", "--wait")
    header, *rows = run_cli("jobs").stdout.splitlines()
    assert header.split() == ["JOB", "STATE", "MODEL", "ROWS", "FAILED", "TOK/S", "LEFT", "SUBMITTED"]
    assert [row.split()[:5] for row in rows] == [
        [second, "finished", MODEL, "1/1", "0"],
        [first, "partial", MODEL, "2/2", "1"],
    ]
    assert len(run_cli("jobs", "--limit", 1).stdout.splitlines()) == 2
    records = json.loads(run_cli("jobs", "--json").stdout)
    assert [record["job_id"] for record in records] == [second, first]
    assert [record["state"] for record in records] == ["finished", "partial"]
    assert json.loads(run_cli("jobs", "--json", "--model", "other").stdout) == []


def test_the_list_of_workers(run_cli: RunCli, client: redis.Redis) -> None:
    assert "no workers: start one with" in run_cli("workers").stderr
    with EchoWorker(client):
        header, row = wait_for("a worker", lambda: run_cli("workers").stdout).splitlines()
        assert header.split() == ["WORKER", "MODEL", "RUNNING", "WAITING", "TOK/S", "CACHED", "UP", "ON"]
        assert row.split()[:6] == ["echo-1", MODEL, "0", "0", "123", "25%"]
        (record,) = json.loads(run_cli("workers", "--json").stdout)
        assert (record["worker_id"], record["description"]) == ("echo-1", {"device": "none"})
        assert json.loads(run_cli("workers", "--json", "--model", "other").stdout) == []


def test_cancel(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path) -> None:
    job_id = submit(["a", "b"])
    result = run_cli("cancel", job_id)
    assert (result.stdout, f"finished rows stay in {tmp_path / 'out'}" in result.stderr) == ("", True)
    with Client() as api, EchoWorker(client):
        assert api.job(job_id).wait(20).state is JobState.CANCELED
    assert fields(run_cli("status", job_id).stdout)["state"] == "canceled"


def test_jobs_that_can_not_be_canceled(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    assert f"job {job_id} can't be canceled: it is finished" in run_cli("cancel", job_id, code=1).stderr
    for command in ("cancel", "status", "tail", "results"):
        assert "Error: no job nothing: list them with" in run_cli(command, "nothing", code=3).stderr
