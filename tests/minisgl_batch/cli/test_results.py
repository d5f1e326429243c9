"""`results`: all formats, to standard output and to files, of whole and unfinished jobs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import redis

from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import RunCli
from tests.minisgl_batch.cli.test_look import half_done
from tests.minisgl_batch.echo_worker import EchoWorker


def test_what_is_neither_job_nor_folder(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("nodir", "empty"):
        error = run_cli("results", name, code=3).stderr
        assert error.startswith(f"Error: no job {name}: ")
        assert error.endswith("; and no folder of that name holds a dataset\n")


def test_formats(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}], "custom_id": "é"}, {"prompt": "b", "metadata": {"k": 1}}]
    with EchoWorker(client):
        job_id = submit(rows, "--wait")
    lines = [json.loads(line) for line in run_cli("results", job_id).stdout.splitlines()]
    assert [line["text"] for line in lines] == ["echo a", "echo b"]
    assert lines[1]["metadata"] == {"k": 1}
    openai = [json.loads(line) for line in run_cli("results", job_id, "--format", "openai").stdout.splitlines()]
    assert openai[0]["custom_id"] == "é"
    assert openai[0]["response"]["body"]["choices"][0]["message"]["content"] == "echo a"
    table = list(csv.DictReader(io.StringIO(run_cli("results", job_id, "--format", "csv").stdout)))
    assert [row["text"] for row in table] == ["echo a", "echo b"]
    raw = run_cli("results", job_id, "--format", "parquet").stdout_bytes
    assert pq.read_table(io.BytesIO(raw))["text"].to_pylist() == ["echo a", "echo b"]
    result = run_cli("results", job_id, "--format", "parquet", "--output", tmp_path / "all.parquet")
    assert result.stdout == ""
    assert f"2 results written to {tmp_path / 'all.parquet'}" in result.stderr
    assert pq.read_table(tmp_path / "all.parquet").num_rows == 2


def test_the_format_follows_the_ending(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a", "b"], "--wait")
    for name in ("out.jsonl", "out.json", "without", "out.v2/without"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        run_cli("results", job_id, "-o", tmp_path / name)
        assert [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()] == ["echo a", "echo b"]
    run_cli("results", job_id, "-o", "out.CSV")
    assert [row["text"] for row in csv.DictReader((tmp_path / "out.CSV").open())] == ["echo a", "echo b"]
    run_cli("results", "out", "-o", "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["text"].to_pylist() == ["echo a", "echo b"]
    run_cli("results", job_id, "-o", "odd.csv", "--format", "jsonl")
    assert json.loads((tmp_path / "odd.csv").read_text().splitlines()[0])["text"] == "echo a"
    for name in ("out.tsv", "out.jsonl.gz"):
        error = run_cli("results", job_id, "-o", name, code=2).stderr
        known = ".jsonl, .json, .csv, .parquet"
        assert error == f"Error: --output: {name!r} ends in none of {known}: end it so, or say which --format\n"
        assert not (tmp_path / name).exists()
        run_cli("results", job_id, "-o", name, "--format", "jsonl")


def test_openai_output_of_text_completions(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    (line,) = run_cli("results", job_id, "--format", "openai").stdout.splitlines()
    body = json.loads(line)["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "echo a")


def test_an_unfinished_job(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client, hold=True):
        job_id = submit(["a", "b", "c", "d"], "--chunk-rows", 3)
        wait_for("rows", lambda: half_done(job_id))
        refused = run_cli("results", job_id, code=1)
        assert "is running: wait for its end, or give --partial" in refused.stderr
        (line,) = run_cli("results", job_id, "--partial").stdout.splitlines()
        assert json.loads(line)["text"] == "echo a"
        run_cli("cancel", job_id)


def test_a_canceled_job(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client, hold=True):
        job_id = submit(["a", "b"])
        wait_for("rows", lambda: half_done(job_id))
        run_cli("cancel", job_id)
        run_cli("tail", job_id, code=1)
    result = run_cli("results", job_id)
    assert f"job {job_id} was canceled: these are the rows that were finished" in result.stderr
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["echo a"]


def test_a_file_is_there_whole_or_not_at_all(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a", "b"], "--wait", "--chunk-rows", 1)
    (tmp_path / "out" / "part-000001.parquet").write_bytes(b"damaged")
    target = tmp_path / "files" / "all.jsonl"
    assert "can't be written: No such file" in run_cli("results", job_id, "-o", target, code=1).stderr
    target.parent.mkdir()
    target.write_text("old")
    assert "part-000001.parquet can't be read" in run_cli("results", job_id, "-o", target, code=1).stderr
    assert os.listdir(target.parent) == ["all.jsonl"]
    assert target.read_text() == "old"


def test_a_folder_in_place_of_a_job(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is all that is left of a `run`."""
    with EchoWorker(client):
        job_id = submit([{"messages": [{"role": "user", "content": "a"}]}, "b"], "--wait", "--chunk-rows", 1)
    of_the_job = [run_cli("results", job_id, "--format", name).stdout for name in ("jsonl", "openai", "csv")]
    client.flushdb()
    monkeypatch.setenv("MINISGL_REDIS", "unix:///nowhere.sock")
    for folder in ("out", tmp_path / "out", (tmp_path / "out").as_uri()):
        found = [run_cli("results", folder, "--format", name).stdout for name in ("jsonl", "openai", "csv")]
        assert found == of_the_job
    record = json.loads(run_cli("results", "out", "--json", "-o", tmp_path / "all.jsonl").stdout)
    assert (record["job_id"], record["state"], record["num_results"]) == (job_id, "finished", 2)
    (tmp_path / "out" / "_manifest.json").unlink()
    assert "isn't finished: --partial" in run_cli("results", "out", code=1).stderr
    assert len(run_cli("results", "out", "--partial").stdout.splitlines()) == 2
    (tmp_path / "empty").mkdir()
    run_cli("results", "empty", code=4)  # a job, for all that is known


def test_nothing_is_written_into_the_datasets_own_folder(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    (tmp_path / "folder").symlink_to("out")
    (tmp_path / "file.parquet").symlink_to("out/all.parquet")
    (tmp_path / "out" / "sub").mkdir()
    before = sorted(os.listdir("out"))
    for source in (job_id, "out", "folder", (tmp_path / "out").as_uri()):
        for output in ("out/all.parquet", "folder/all.csv", "file.parquet", "out/sub/all.jsonl", "out/../out/a.csv"):
            error = run_cli("results", source, "-o", output, code=2).stderr
            assert error.startswith(f"Error: --output: {output!r} is in the dataset's own folder, ")
    assert sorted(os.listdir("out")) == before
    run_cli("results", "out", "-o", "out.parquet")


def test_links_stay_and_pipes_are_written_to(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a", "b"], "--wait")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)
        run_cli("results", job_id, "-o", pipe)
        assert len(read.result(20).splitlines()) == 2
    assert pipe.is_fifo()
    (tmp_path / "link").symlink_to("target")
    for _ in range(2):  # a link to nothing, and one to a file
        run_cli("results", job_id, "-o", tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert len((tmp_path / "target").read_bytes().splitlines()) == 2


@pytest.mark.parametrize("output", ["-", "/dev/stdout", "/dev/fd/1"])
def test_names_of_standard_output(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], output: str, tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a", "b"], "--wait")
    before = sorted(os.listdir(tmp_path))
    assert run_cli("results", job_id, "-o", output).stdout == run_cli("results", job_id).stdout
    assert "--json needs --output FILE" in run_cli("results", job_id, "-o", output, "--json", code=2).stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_open_descriptors_are_written_to(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a", "b"], "--wait")
    lines = run_cli("results", job_id).stdout
    with (tmp_path / "log").open("a") as log:  # as `>> log` opens it
        log.write("before\n")
        log.flush()
        run_cli("results", job_id, "-o", f"/dev/fd/{log.fileno()}")
    assert (tmp_path / "log").read_text() == f"before\n{lines}"
    reading, writing = os.pipe()
    with open(reading) as end:
        run_cli("results", job_id, "-o", f"/proc/self/fd/{writing}")
        os.close(writing)
        assert end.read() == lines
    closed = run_cli("results", job_id, "-o", "/dev/fd/9999", code=1).stderr
    assert "/dev/fd/9999 can't be written: Bad file descriptor" in closed


@pytest.mark.parametrize("output", ["", ".", "out"])
def test_folders_are_no_files(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], output: str, tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    before = sorted(os.listdir(tmp_path))
    assert f"--output: {output!r} is a folder: name a file" in run_cli("results", job_id, "-o", output, code=2).stderr
    assert "can't be written: File name too long" in run_cli("results", job_id, "-o", "x" * 300, code=1).stderr
    assert sorted(os.listdir(tmp_path)) == before
