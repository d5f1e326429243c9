"""`minisgl-batch run`: all in one command, and nothing of it is left however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from minisgl_batch.hub import DEMO_MODEL, model_path
from minisgl_batch.sampling_params import NEUTRAL, SamplingParams
from minisgl_batch.tokenizer.model_defaults import read_model_defaults
from tests.integration.conftest import Start
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import write_rows
from tests.minisgl_batch.models.overflowing import SPOILER, save_overflowing

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "prompts.jsonl"


def left_behind(home: Path) -> list[str]:
    """Processes and temporary files of commands that have ended."""
    found = os.listdir(home / "tmp")
    for process in psutil.process_iter(["cmdline", "environ"]):
        environ, cmdline = process.info["environ"] or {}, process.info["cmdline"] or []
        if environ.get("TMPDIR") == str(home / "tmp") or any(str(home) in part for part in cmdline):
            found.append(" ".join(cmdline) or f"process {process.pid}")
    return found


@pytest.fixture(autouse=True)
def _leaves_nothing(home: Path) -> object:
    yield
    wait_for("the end of all that a run has started", lambda: not left_behind(home), 20)


def test_a_file_becomes_a_dataset(start: Start, tmp_path: Path) -> None:
    with start("run", EXAMPLES, "--model", "demo", "--output", "answers") as run:
        run.finish()
    folder = tmp_path / "answers"
    assert run.stdout == f"{folder}\n"
    assert "finished: 224 rows ok, 0 failed in " in run.stderr
    assert "% of prompt tokens from the cache" in run.stderr
    assert '"65 + 983 =" -> "1048"' in run.stderr
    names = sorted(name for name in os.listdir(folder) if not name.startswith("part-"))
    assert names == ["_SUCCESS", "_manifest.json", "_worker.log"]
    assert pq.read_table(folder).num_rows == 224
    check = [sys.executable, ROOT / "examples" / "check_answers.py", folder]
    assert subprocess.run(check, capture_output=True, text=True, check=True).stdout.splitlines()[-1].startswith("all")
    with start("run", EXAMPLES, "--model", "demo", "--output", "answers") as again:
        again.finish()
    assert again.stdout == f"{folder}\n"
    assert "has nothing left to do: 224 of 224 rows are in" in again.stderr
    assert "starting a worker" not in again.stderr


def test_failed_rows_and_faults_show_in_the_exit_code(start: Start, tmp_path: Path) -> None:
    scored = {"prompt": "65 + 983 =", "choices": ["1047", "1048"]}
    asked = (
        {"json": {"enum": [{"sum": 1048}, None]}},
        {"json": {"type": "sum"}},
        {"regex": "(1|2"},
        {"regex": "[12]{4}"},
    )
    shaped = [{"prompt": "65 + 983 =", "structured_outputs": given} for given in asked]
    source = write_rows(tmp_path / "in.jsonl", ["65 + 983 =", "", scored, *shaped])
    with start("run", source, "--model", "demo") as refused:
        refused.finish(code=2)
    assert "1 of 7 rows can't be used" in refused.stderr
    assert os.listdir(tmp_path) == ["in.jsonl"]
    options = ("--on-error", "record", "--chat", "--job-id", "mine", "--verbose", "--served-model-name", "x")
    options += ("--logprobs", "2", "--prompt-logprobs", "0")
    with start("run", source, "--model", "demo", *options) as run:
        run.finish(code=1)
    assert run.stdout == f"{tmp_path / 'outputs' / 'mine'}\n"
    assert "partial: 4 rows ok, 3 failed" in run.stderr
    assert "failed: row_index 1: invalid_request: line 2: prompt is empty" in run.stderr
    assert "KV cache of" in run.stderr  # the worker's log
    manifest = json.loads((tmp_path / "outputs" / "mine" / "_manifest.json").read_text())
    assert (manifest["model"], manifest["state"]) == ("x", "partial")
    recommended = read_model_defaults(model_path("demo")).sampling
    used = SamplingParams(logprobs=2, prompt_logprobs=0).over(recommended, NEUTRAL)
    assert SamplingParams(**manifest["effective_sampling"]) == used
    assert "temperature" not in manifest["sampling"]
    good, bad, best, *shaped = pq.read_table(tmp_path / "outputs" / "mine").to_pylist()
    tokens = "".join(entry["token"] for entry in good["logprobs"])
    assert tokens.startswith(good["text"])
    assert {len(entry["top_logprobs"]) for entry in good["logprobs"]} == {2}
    assert good["prompt_logprobs"][0] is None
    assert "65 + 983 =" in "".join(entry["token"] for entry in good["prompt_logprobs"][1:])
    assert (bad["logprobs"], bad["prompt_logprobs"], bad["choices"], good["choices"]) == (None,) * 4
    assert (best["text"], best["finish_reason"], best["completion_tokens"]) == ("1048", "stop", 0)
    assert [choice["text"] for choice in best["choices"]] == ["1047", "1048"]
    assert best["choices"][0]["logprob"] < best["choices"][1]["logprob"] <= 0
    assert (best["logprobs"], best["prompt_tokens"]) == (None, good["prompt_tokens"])
    assert [row["status"] for row in shaped] == ["ok", "error", "error", "ok"]
    assert json.loads(shaped[0]["text"]) in ({"sum": 1048}, None)
    assert (shaped[1]["error_type"], shaped[1]["text"]) == ("invalid_request", None)
    assert shaped[1]["error_message"] == "structured_outputs: Invalid type: sum"
    assert "unclosed group" in shaped[2]["error_message"]
    assert re.fullmatch("[12]{4}", shaped[3]["text"])


def test_failed_rows_of_a_run_are_told_and_run_again(start: Start, tmp_path: Path) -> None:
    """By another engine: the manifest names both, and the sampling of each."""
    model = tmp_path / "model"
    shutil.copytree(model_path(DEMO_MODEL), model)
    source = write_rows(tmp_path / "in.jsonl", ["1 + 1 =", "What is 17 + 25, and what is 65 + 983?"])
    run = ("run", source, "--model", model, "--max-tokens", 4)
    with start(*run, "--max-seq-len", 16) as first:
        first.finish(code=1)
    output = first.stdout.strip()
    assert f"to run it again: the same command with --output {output} --retry-failed\n" in first.stderr
    assert first.stderr.endswith("with another --truncate it is another job: give it another --output\n")
    with start(*run, "-o", output) as second:
        second.finish(code=1)
    assert "2 of 2 rows are in" in second.stderr
    assert "1 of them failed; to run those again: the same command with --retry-failed\n" in second.stderr
    assert "failed: row_index 1: prompt_too_long: " in second.stderr
    assert "starting a worker" not in second.stderr
    before = (Path(output) / "_manifest.json").read_bytes()
    with start(*run, "-o", output, "--json") as scripted:
        scripted.finish(code=1)
    assert "starting a worker" not in scripted.stderr
    record, manifest = json.loads(scripted.stdout), json.loads(before)
    assert (record["state"], record["rows_ok"], record["rows_error"]) == ("partial", 1, 1)
    assert datetime.fromtimestamp(record["finished_at"], timezone.utc).isoformat() == manifest["finished_at"].replace(
        "Z", "+00:00"
    )
    assert (Path(output) / "_manifest.json").read_bytes() == before
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    with start(*run, "-o", output, "--retry-failed") as third:
        third.finish()
    assert f"1 of 2 rows are in {output}; 1 failed row runs again" in third.stderr
    assert "finished: 2 rows ok, 0 failed" in third.stderr
    old, new = json.loads((Path(output) / "_manifest.json").read_text())["engines"]
    assert (old["default_sampling"], new["default_sampling"]) == ({"temperature": 0}, {"temperature": 0.6, "top_k": 20})
    assert {name for name in old if old[name] != new[name]} == {"default_sampling", "model_fingerprint"}
    assert (old["device"], old["torch"]) == ("cpu", version("torch"))
    assert "another engine's, and stay: model_fingerprint was " in third.stderr


def test_rows_whose_numbers_overflow_are_told_and_run_again(start: Start, tmp_path: Path) -> None:
    model = save_overflowing(tmp_path / "model")
    chosen = {"choices": ["1", "2"]}
    rows = ["1 + 1 =", f"1 {SPOILER} 1 =", {"prompt": "1", **chosen}, {"prompt": f"{SPOILER} 1", **chosen}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    run = ("run", source, "--model", model, "--max-tokens", 4, "-o", "answers")
    with start(*run, "--dtype", "float16") as first:
        first.finish(code=1)
    assert "partial: 2 rows ok, 2 failed" in first.stderr
    assert "numbers overflowed in float16; run with --dtype bfloat16 or float32" in first.stderr
    assert first.stderr.endswith("to run them again: the same command with --retry-failed\n")
    found = pq.read_table(tmp_path / "answers").to_pylist()
    assert [row["error_type"] for row in found] == [None, "numeric_overflow", None, "numeric_overflow"]
    assert (found[1]["text"], found[1]["finish_reason"], found[3]["choices"]) == (None, "error", None)
    with start(*run, "--dtype", "bfloat16", "--retry-failed") as second:
        second.finish()
    assert "finished: 4 rows ok, 0 failed" in second.stderr


def test_an_interrupt_keeps_what_is_finished(start: Start, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "max_tokens": 1}, *({"prompt": f"{i} +", "max_tokens": 1900} for i in range(60))]
    source = write_rows(tmp_path / "in.jsonl", rows)
    with start("run", source, "--model", "demo", "--output", "out", "--ignore-eos", "--json") as run:
        run.wait_for("running: ")
        run.signal(signal.SIGINT)
        run.finish(code=130)
    assert "canceling, finished rows are kept" in run.stderr
    assert "start it again to go on with the other rows" in run.stderr
    record = json.loads(run.stdout)
    assert (record["state"], record["output"]) == ("canceled", str(tmp_path / "out"))
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["state"] == "canceled"
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert manifest["num_ok"] == sum(pq.read_metadata(part).num_rows for part in (tmp_path / "out").glob("part-*"))


def test_a_folder_that_can_not_be_written_is_said_and_keeps_no_run_from_ending(start: Start, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} +", "max_tokens": 300, "ignore_eos": True} for i in range(12)]
    options = ("--model", "demo", "--output", "out", "--chunk-rows", 4)
    with start("run", write_rows(tmp_path / "in.jsonl", rows), *options) as run:
        run.wait_for("running: ")
        (tmp_path / "out").rename(tmp_path / "away")
        (tmp_path / "out").touch()
        run.wait_for("waiting: ")
        run.signal(signal.SIGTERM)
        run.finish(code=1)
    assert "can't be written: File exists" in run.stderr
    assert "is left unfinished" in run.stderr.splitlines()[-1]


def test_an_interrupted_run_without_an_output_says_which_one_goes_on(start: Start, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "max_tokens": 1}, *({"prompt": f"{i} +", "max_tokens": 1900} for i in range(30))]
    run = ("run", write_rows(tmp_path / "in.jsonl", rows), "--model", "demo", "--ignore-eos")
    with start(*run, "--overwrite") as interrupted:
        interrupted.wait_for("running: ")
        interrupted.signal(signal.SIGINT)
        interrupted.finish(code=130)
    said = f"start it again with --output {interrupted.stdout.strip()} without --overwrite to go on"
    assert said in interrupted.stderr
    with start(*run, "--output", interrupted.stdout.strip()) as again:
        again.wait_for("running: ")
        again.signal(signal.SIGINT)
        again.finish(code=130)
    assert "goes on: " in again.stderr
    assert "start it again to go on with the other rows" in again.stderr


def test_two_interrupts_stop_at_once(start: Start) -> None:
    with start("run", EXAMPLES, "--model", "demo", "--max-tokens", 1500, "--ignore-eos") as run:
        run.wait_for("running: ")
        run.signal(signal.SIGTERM)
        run.wait_for("canceling, finished rows are kept")
        run.signal(signal.SIGINT)
        run.finish(code=130, timeout_s=10)


def test_nothing_survives_a_kill(start: Start, home: Path) -> None:
    with start("run", EXAMPLES, "--model", "demo", "--max-tokens", 1500, "--ignore-eos") as run:
        run.wait_for("running: ")
        assert len(left_behind(home)) > 5
        run.signal(signal.SIGKILL)
        run.finish(code=-signal.SIGKILL)


def test_a_run_that_was_killed_goes_on_when_it_is_started_again(start: Start, home: Path, tmp_path: Path) -> None:
    """Its Redis is gone with it."""
    run = ("run", EXAMPLES, "--model", "demo", "--output", "out", "--chunk-rows", 16)
    with start(*run) as killed:
        wait_for("the first parts", lambda: len(list((tmp_path / "out").glob("part-*"))) > 1, 60)
        killed.signal(signal.SIGKILL)
        killed.finish(code=-signal.SIGKILL)
    wait_for("the end of its worker, which may write a part yet", lambda: not left_behind(home), 20)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    with start(*run) as again:
        again.finish()
    assert f"goes on: {16 * len(before)} of 224 rows are in" in again.stderr
    assert pq.read_table(tmp_path / "out")["row_index"].to_pylist() == list(range(224))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_worker_that_can_not_start(start: Start, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    with start("run", source, "--model", "./nothing") as missing:
        missing.finish(code=2)
    assert missing.stderr.endswith("--verbose shows the worker's log\nError: no model folder at nothing\n")
    with start("run", source, "--model", "demo", "--max-seq-len", 10**6, "--output", "out") as refused:
        refused.finish(code=2)
    assert "Error: --max-seq-len: 1000000 is more than the model's context" in refused.stderr
    assert os.listdir(tmp_path) == ["in.jsonl"]
