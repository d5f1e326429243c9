"""`tail`: every text once, early or late, and the job's outcome as the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import redis

from minisgl_batch.client import Client
from minisgl_jobs.model import JobState
from tests.minisgl_batch.cli.conftest import RunCli
from tests.minisgl_batch.echo_worker import GROWING, EchoWorker
from tests.processes import Command, environment


def test_a_line_for_each_sample(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    rows = ["a", {"prompt": "line\nfeed\x1b[0m", "custom_id": "named"}, {"prompt": "two", "n": 2}, "fail"]
    with EchoWorker(client):
        job_id = submit(rows)
        early = run_cli("tail", job_id, code=1)
    late = run_cli("tail", job_id, code=1)
    for result in (early, late):
        assert sorted(result.stdout.splitlines()) == [
            "0\techo a",
            "2\techo two",
            "2[1]\techo two (1)",
            "named\techo line\\nfeed\\x1b[0m",
        ]
        assert "3: refused: the prompt asks for it\n" in result.stderr
        assert f"job {job_id} is partial: 3 rows ok, 1 failed" in result.stderr


def test_a_job_that_waits_runs_and_finishes(client: redis.Redis, submit: Callable[..., str]) -> None:
    job_id = submit(["a", "b"])
    with Command("tail", job_id) as result:
        result.wait_for("the job is queued, waiting: no worker for echo")
        with EchoWorker(client):
            result.finish()
    assert result.stderr.count("the job is queued") == 1
    assert sorted(result.stdout.splitlines()) == ["0\techo a", "1\techo b"]
    assert "is finished: 2 rows ok, 0 failed" in result.stderr


def test_one_row_as_it_grows(client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client, hold=True) as worker:
        job_id = submit(["a", "b"])
        with Command("tail", job_id, "--row", 1) as result:
            result.wait_for(GROWING)
            worker.go_on.set()
            result.finish()
    # The second half of the echo worker's chunk is a new attempt.
    assert result.stdout == f"{GROWING}\necho b\n"
    assert "the row starts anew: its worker was lost" in result.stderr


def test_a_terminal_shows_texts_that_grow(client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client, hold=True) as worker:
        job_id = submit(["a\x1b[31m", "b"])
        with Command("tail", job_id, terminal=True, TERM="xterm", NO_COLOR="1") as result:
            result.wait_for(f"1 {GROWING}")
            worker.go_on.set()
            result.finish()
    # A bell's and a colour's escapes come from rich alone, never from a text.
    assert "echo a\\x1b[31m" in result.stdout
    assert "\x1b[31m" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1].endswith(f"job {job_id} is finished: 2 rows ok, 0 failed")


def test_samples_of_one_row_come_one_after_the_other(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]
) -> None:
    with EchoWorker(client):
        job_id = submit([{"prompt": "x\ny", "n": 3}, "fail"])
        result = run_cli("tail", job_id, "--row", 0, code=1)
        assert result.stdout == "echo x\ny\necho x\ny (1)\necho x\ny (2)\n"
        failed = run_cli("tail", job_id, "--row", 1, code=1)
    assert failed.stdout == "\n"
    assert "failed: refused: the prompt asks for it" in failed.stderr


def test_rows_that_are_not_there(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client):
        job_id = submit(["a", "b"], "--wait")
    assert "has no row 2: its rows are 0 to 1" in run_cli("tail", job_id, "--row", 2, code=2).stderr


def test_interrupting_the_view_leaves_the_job_alone(client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client, hold=True) as worker:
        job_id = submit(["a", "b"])
        with Command("tail", job_id) as result:
            result.wait_for("echo a")
            result.signal(signal.SIGINT)
            result.finish(code=130)
        assert result.stderr.endswith("interrupted\n")
        worker.go_on.set()
        with Client() as api:
            assert api.job(job_id).wait(20).state is JobState.FINISHED


def test_a_reader_that_leaves_early(client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client):
        job_id = submit([f"{i} " + "x" * 1000 for i in range(300)], "--wait")
    for command in ("tail", "results"):
        shell = f"{sys.executable} -m minisgl_batch.cli.main {command} {job_id} | head -1"
        result = subprocess.run(shell, shell=True, capture_output=True, text=True, check=True, env=environment())
        assert "echo 0 x" in result.stdout
        assert result.stderr == ""


def test_a_canceled_job(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client, hold=True):
        job_id = submit(["a", "b", "c", "d"])
        with Command("tail", job_id) as result:
            result.wait_for("echo b")
            run_cli("cancel", job_id)
            result.finish(code=1)
    assert sorted(result.stdout.splitlines()) == ["0\techo a", "1\techo b"]
    assert f"job {job_id} is canceled" in result.stderr
