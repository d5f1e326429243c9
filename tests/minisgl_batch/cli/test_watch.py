"""`status` of everything, and `--watch`: live on a terminal, looks one after the other elsewhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest
import redis

from minisgl_batch.cli.watch import watch
from minisgl_batch.client import Client
from minisgl_batch.errors import RedisUnavailableError
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import RunCli
from tests.minisgl_batch.cli.test_look import half_done
from tests.minisgl_batch.echo_worker import MODEL, EchoWorker
from tests.processes import Command


def test_status_of_everything(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    assert run_cli("status").stdout == "0 jobs under way, 0 workers, 0 tokens/s\n"
    with EchoWorker(client, hold=True) as worker:
        job_id = submit(["a", "b", "c", "d"])
        wait_for("half of the rows", lambda: half_done(job_id))
        jobs, workers, summary = run_cli("status").stdout.split("\n\n")
        assert jobs.splitlines()[0].split() == ["JOB", "STATE", "MODEL", "ROWS", "FAILED", "TOK/S", "LEFT", "SUBMITTED"]
        assert jobs.splitlines()[1].split()[:6] == [job_id, "running", MODEL, "2/4", "0", "123"]
        assert workers.splitlines()[1].split()[:5] == ["echo-1", MODEL, "0", "0", "123"]
        assert summary == "1 job under way, 1 worker, 123 tokens/s\n"
        record = json.loads(run_cli("status", "--json").stdout)
        assert (record["jobs"][0]["rows_done"], record["jobs"][0]["tokens_per_s"]) == (2, 123.0)
        assert record["workers"][0]["worker_id"] == "echo-1"
        assert run_cli("status", "--model", "other").stdout == "0 jobs under way, 0 workers, 0 tokens/s\n"
        worker.go_on.set()
        with Client() as api:
            api.job(job_id).wait(20)


def test_watching_a_job_ends_with_it(client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client, hold=True) as worker:
        job_id = submit(["a", "fail"])
        with (
            Command("status", job_id, "--watch", "--interval", 0.1, "--json") as plain,
            Command("status", job_id, "--watch", "--interval", 0.1) as blocks,
        ):
            plain.wait_for('"state": "running"')
            blocks.wait_for("1 of 2 done")
            with Command("status", job_id, "--watch", terminal=True, TERM="xterm", NO_COLOR="1") as live:
                live.wait_for("1 of 2 done")
                worker.go_on.set()
                plain.finish(code=1)
                live.finish(code=1)
                blocks.finish(code=1)
    assert {block.count("\nstate") for block in blocks.stdout.strip("\n").split("\n\n")} == {1}
    assert json.loads(plain.stdout.splitlines()[-1])["state"] == "partial"
    assert "Traceback" not in live.stdout
    assert "partial" in live.stdout


@pytest.mark.parametrize("terminal", [True, False])
def test_an_interrupt_ends_the_view(client: redis.Redis, submit: Callable[..., str], terminal: bool) -> None:
    with EchoWorker(client, hold=True) as worker:
        job_id = submit(["a", "b"])
        with Command("status", "--watch", "--interval", 0.1, terminal=terminal, TERM="xterm", NO_COLOR="1") as view:
            view.wait_for(job_id)
            view.signal(signal.SIGINT)
            view.finish(code=130)
        assert "interrupted" in view.stdout + view.stderr
        assert "Traceback" not in view.stdout + view.stderr
        worker.go_on.set()
        with Client() as api:
            api.job(job_id).wait(20)


def test_a_short_outage_is_put_up_with(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([1, RedisUnavailableError("Redis is away"), 2])

    def look() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    seen: list[int] = []
    last = watch(look, str, seen.append, interval_s=0.001, is_over=lambda answer: answer == 2)
    assert (last, seen) == (2, [1, 2])
    assert capsys.readouterr().err == "Redis is away\n"
    answers = iter([RedisUnavailableError("Redis is away")])
    with pytest.raises(RedisUnavailableError):
        watch(look, str, seen.append, interval_s=0.001)
