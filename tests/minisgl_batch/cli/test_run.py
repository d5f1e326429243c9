"""`run` beside another run."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from minisgl_batch.cli.job_checks import check_biases
from minisgl_batch.hub import model_path
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.own_server import default_data_dir, socket_path
from minisgl_workers.redis_watchdog import answers
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import RunCli, write_rows
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
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Though the run has a Redis of its own, which knows nothing of that job, and the job's own one is down."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MINISGL_REDIS")
    source, folder = write_rows(tmp_path / "in.jsonl", ["a"]), tmp_path / "out"
    job_id = run_cli("submit", source, "--model", MODEL, "-o", folder).stdout.strip()
    wait_for("the server's end", lambda: not answers(str(socket_path(default_data_dir()))))
    refused = run_cli("run", source, "--model", MODEL, "-o", folder, *options, code=2)
    assert f"{folder} is the output of job {job_id}, which is queued: cancel it first" in refused.stderr
    assert f"minisgl-batch status {job_id}" in refused.stderr


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
