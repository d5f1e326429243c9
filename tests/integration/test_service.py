"""A worker in one terminal, `submit`, `tail` and the others in more of them, on a machine without Redis."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.minisgl_batch.cli.conftest import write_rows
from tests.processes import Command, environment

DOCS = Path(__file__).parents[2] / "docs" / "client.md"
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
LONG = ("--max-tokens", 1500, "--ignore-eos")  # longer than any test
BRIEF = ("--max-tokens", 150, "--ignore-eos")


@pytest.fixture(autouse=True)
def _is_served(worker: Command) -> Iterator[None]:
    yield
    worker.wait_for("serving")  # it must have lived through the test


def test_submit_tail_status_and_results(start: Start, worker: Command, tmp_path: Path) -> None:
    with start("submit", EXAMPLES, "--model", "demo", "--limit", 40) as submitting:
        job_id = submitting.finish().stdout.strip()
    assert "40 rows queued for demo" in submitting.stderr
    assert "warning" not in submitting.stderr
    with start("tail", job_id) as tail, start("tail", job_id, "--row", 7) as one:
        texts = dict(line.split("\t") for line in tail.finish().stdout.splitlines())
        one.finish()
    with start("results", job_id) as results:
        rows = [json.loads(line) for line in results.finish().stdout.splitlines()]
    assert [row["row_index"] for row in rows] == list(range(40))
    assert {row["custom_id"]: row["text"] for row in rows} == texts
    assert one.stdout == f"{rows[7]['text']}\n"
    assert sum(row["text"] == row["metadata"]["answer"] for row in rows) >= 38
    with start("status", job_id, "--json") as status, start("jobs") as jobs, start("workers", "--json") as workers:
        record = json.loads(status.finish().stdout)
        assert f"\n{job_id}  finished" in jobs.finish().stdout
        (served,) = json.loads(workers.finish().stdout)
    assert (record["state"], record["rows_ok"], record["rows_error"]) == ("finished", 40, 0)
    assert record["output"] == str(tmp_path / "outputs" / job_id)
    assert record["tokens"]["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert (served["model"], served["description"]["device"]) == ("demo", "cpu")
    ready = json.loads(worker.stdout.splitlines()[0])
    assert (ready["model"], ready["processes"]["frontend"]["engine"]["device"]) == ("demo", "cpu")


def test_bad_rows_become_error_rows_and_the_others_finish(start: Start, tmp_path: Path) -> None:
    source = tmp_path / "mixed.jsonl"
    good = {0: "65 + 983 =", 9: "two as a number:"}
    bad = [
        '{"prompt": ""}',
        json.dumps({"prompt": "far too long " * 3000}),
        '{"prompt": "a", "max_tokens": 1000000000}',
        '{"prompt": "a", "max_tokens": "16"}',
        '{"prompt": "a", "max_tokens": 1.5}',
        '{"prompt": "a", "custom_id": "first"}',
        '{"prompt": "a"',
        '{"prompt_token_ids": [99999999]}',
    ]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in good.values()]
    lines[0] = lines[0].replace("{", '{"custom_id": "first", ', 1)
    source.write_text("\n".join([lines[0], *bad, lines[1]]))
    with start("submit", source, "--model", "demo") as refused:
        refused.finish(code=2)
    assert "6 of 10 rows can't be used" in refused.stderr
    with start("submit", source, "--model", "demo", "--on-error", "record", "--max-tokens", 20, "--wait") as command:
        job_id = command.finish(code=1).stdout.strip()
    assert "partial: 2 rows ok, 8 failed" in command.stderr
    with start("results", job_id) as results, start("tail", job_id) as tail:
        rows = [json.loads(line) for line in results.finish().stdout.splitlines()]
        tail.finish(code=1)
    assert [row["row_index"] for row in rows if row["status"] == "ok"] == list(good)
    assert [row["text"] for row in rows if row["status"] == "ok"] == ["1048", "2"]
    assert rows[2]["error_type"] == "prompt_too_long"
    assert {row["error_type"] for row in rows[1:9]} == {"invalid_request", "prompt_too_long"}
    for row in rows[1:9]:
        assert f"{row['custom_id'] or row['row_index']}: {row['error_type']}: " in tail.stderr


def test_one_row_streams_while_it_is_generated_and_cancel_ends_the_job(start: Start) -> None:
    with start("submit", EXAMPLES, "--model", "demo", *LONG) as submitting:
        job_id = submitting.finish().stdout.strip()
    with start("tail", job_id, "--row", 3) as tail:
        tail.wait_for("970, 410")
        with start("status", job_id) as status:
            assert "\nstate      running\n" in status.finish().stdout
        with start("results", job_id) as early:
            assert "is running: wait for its end" in early.finish(code=1).stderr
        with start("cancel", job_id) as cancel:
            cancel.finish()
        tail.finish(code=1)
    assert f"job {job_id} is canceled" in tail.stderr
    with start("results", job_id) as results:
        assert "was canceled" in results.finish().stderr


def test_a_model_that_nobody_serves(start: Start, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    with start("submit", source, "--model", "other") as submitting:
        job_id = submitting.finish().stdout.strip()
    assert "warning: no worker serves other now: its jobs wait until one does; workers serve demo" in submitting.stderr
    with start("status", job_id) as status:
        assert "waiting    no worker for other" in status.finish().stdout
    with start("cancel", job_id) as cancel:
        cancel.finish()
    with start("jobs", "--model", "other") as jobs:
        assert f"{job_id}  canceled" in jobs.finish().stdout  # the client ends what no worker will


def test_the_examples_of_the_client_run_as_they_stand(home: Path, tmp_path: Path) -> None:
    (socket,) = home.rglob("redis.sock")
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    env = environment(MINISGL_REDIS=f"unix://{socket}")
    printed = [
        subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout
        for block in blocks
    ]
    assert len(printed) == 2
    assert printed[0].split()[1] in ("queued", "running", "finalising", "finished")
    assert printed[0].splitlines()[-2:] == ["42", "ninety-three"]
    assert printed[1] == "1048 (finished)\n"


def test_waiting_can_be_interrupted_and_the_job_goes_on(start: Start) -> None:
    with start("submit", EXAMPLES, "--model", "demo", "--limit", 8, *BRIEF, "--wait") as submitting:
        submitting.wait_for("running: ")
        submitting.signal(signal.SIGINT)
        submitting.finish(code=130)
    job_id = submitting.stdout.strip()
    assert f"job {job_id} goes on" in submitting.stderr
    with start("tail", job_id) as tail:
        assert len(tail.finish().stdout.splitlines()) == 8
