"""`run` beside another run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from minisgl_batch.cli.job_checks import check_biases
from minisgl_batch.hub import model_path
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.connection import connect
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.minisgl_batch.cli.conftest import RunCli, end, write_rows
from tests.minisgl_batch.echo_worker import MODEL


@pytest.mark.parametrize("options", [("--output", "out"), ("--job-id", "mine")])
def test_an_output_has_one_run_at_a_time(run_cli: RunCli, tmp_path: Path, options: tuple[str, str]) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    folder = tmp_path / ("out" if options[1] == "out" else "outputs/mine")
    folder.mkdir(parents=True)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refused = run_cli("run", source, "--model", "demo", *options, code=2)
    assert f"another run writes to {folder}: wait for its end, or use another folder" in refused.stderr
    assert os.listdir(folder) == []
    os.close(held)


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_a_run_leaves_the_folder_of_a_service_job_alone(
    run_cli: RunCli,
    client: redis.Redis,
    redis_server: EmbeddedRedis,
    submit: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    """Though the run has a Redis of its own, which knows nothing of that job."""
    job_id = submit(["a"])
    with monkeypatch.context() as patched:
        patched.delenv("MINISGL_REDIS")
        patched.setattr("minisgl_batch.client.client.connect_own", lambda: connect(redis_server.url))
        refused = run_cli("run", tmp_path / "in.jsonl", "--model", MODEL, "-o", tmp_path / "out", *options, code=2)
    assert f"{tmp_path / 'out'} is the output of job {job_id}, which is queued: cancel it first" in refused.stderr
    assert f"minisgl-batch status {job_id}" in refused.stderr
    end(client, job_id)


def test_biases_of_tokens_that_the_model_does_not_have_are_refused_once(run_cli: RunCli, tmp_path: Path) -> None:
    size = json.loads((model_path("demo") / "config.json").read_text())["vocab_size"]
    source = write_rows(tmp_path / "in.jsonl", ["a", "b"])
    shown = run_cli("run", source, "--model", "demo", "--logit-bias", f"0:1,{size}:5", code=2).stderr
    assert shown.endswith(f"Error: --logit-bias: ids of this model are in [0, {size}), {size} isn't\n")
    assert os.listdir(tmp_path) == ["in.jsonl"]
    check_biases(SamplingParams(logit_bias={size - 1: 5.0}), "demo", None)
    check_biases(SamplingParams(), "/no model", None)


def test_a_run_that_is_refused_leaves_no_folder(run_cli: RunCli, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": 5}])
    run_cli("run", source, "--model", "demo", "--output", "a/b", code=2)
    assert os.listdir(tmp_path) == ["in.jsonl"]
