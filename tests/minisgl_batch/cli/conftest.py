"""The command line in this process, against a real Redis; workers echo."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from minisgl_batch.cli.main import cli
from minisgl_batch.client import Client
from minisgl_jobs.model import JobState
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.minisgl_batch.echo_worker import MODEL, EchoWorker

RunCli = Callable[..., Result]


@pytest.fixture
def run_cli(
    client: redis.Redis, redis_server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunCli]:
    """Runs a command to its end, in an empty Redis and in the test's own folder; checks its exit code."""
    assert client.dbsize() == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINISGL_REDIS", redis_server.url)
    handlers = list(logging.getLogger().handlers)
    runner = CliRunner()

    def run(*args: object, code: int = 0, stdin: str | bytes | None = None) -> Result:
        result = runner.invoke(cli, [str(arg) for arg in args], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code == code, result.output
        return result

    yield run
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def submit(run_cli: RunCli, tmp_path: Path) -> Callable[..., str]:
    """Submits rows to the echo model, into the folder `out`; answers the job's id."""

    def submit_rows(rows: list[Any], *options: object) -> str:
        source = write_rows(tmp_path / "in.jsonl", rows)
        result = run_cli("submit", source, "--model", MODEL, "-o", tmp_path / "out", *options)
        return result.stdout.strip()

    return submit_rows


def write_rows(path: Path, rows: list[Any]) -> Path:
    """A JSONL file; a string is a prompt."""
    lines = (json.dumps({"prompt": row} if isinstance(row, str) else row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def end(client: redis.Redis, job_id: str) -> None:
    """Cancel a job that a test is done with, and see it to its end."""
    with Client() as api:
        job = api.job(job_id)
        job.cancel()
        with EchoWorker(client):
            assert job.wait(20).state is JobState.CANCELED
