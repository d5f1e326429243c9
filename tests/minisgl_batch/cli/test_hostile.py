"""Hostile input on every command: one clear line and the documented exit code, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import redis
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from minisgl_batch.cli.main import COMMANDS, cli
from minisgl_batch.cli.values import MAX_FILE_BYTES, schema_file
from minisgl_batch.client import Client
from minisgl_jobs.keys import QUEUES, QueueKeys, queue_name
from tests.minisgl_batch.cli.conftest import RunCli, write_rows
from tests.minisgl_batch.echo_worker import MODEL, EchoWorker
from tests.processes import Command, environment

OF_A_JOB = ("status", "tail", "results", "cancel", "retry", "purge")
ODD_IDS = ["", " ", "-", "../x", "a:done", "é", "☃", "a\nb", "a\x1b[31mb", "\udcff", "x" * 10_000, "{queue}", "*", "0"]


@pytest.mark.parametrize("command", OF_A_JOB)
def test_unknown_and_impossible_ids(run_cli: RunCli, submit: Callable[..., str], command: str) -> None:
    job_id = submit(["a"], "--job-id", "a")
    for odd in ODD_IDS:
        result = run_cli(command, "--", odd, code=3)
        assert len(result.stderr.splitlines()) == 1, odd
        assert result.stderr.startswith("Error: no job ")
        assert result.stderr.rstrip("\n").isprintable()
        assert result.stdout == ""
    with Client() as api:
        api.job(job_id).cancel()


@pytest.mark.parametrize(
    "args",
    [
        ("tail", "x", "--row", "-1"),
        ("tail", "x", "--row", "1.5"),
        ("jobs", "--limit", "-1"),
        ("jobs", "--limit", "0"),
        ("status", "--limit", "1e9"),
        ("status", "--watch", "--interval", "0"),
        ("status", "--watch", "--interval", "nan"),
        ("status", "--watch", "--interval", "-3"),
        ("purge", "--finished", "--older-than", "-1d"),
        ("submit", "in.jsonl", "--model", "m", "--at", "yesterday"),
        ("submit", "in.jsonl", "--model", "m", "--max-tokens", "-5"),
        ("submit", "in.jsonl", "--model", "m", "--chunk-rows", "0"),
        ("submit", "in.jsonl", "--model", "m", "--seed", "-1"),
        ("submit", "in.jsonl", "--model", "m", "--job-id", "../../x"),
        ("submit", "in.jsonl", "--model", "\udcff"),
        ("submit", "in.jsonl", "--model", ""),
        ("pause", "\udcff"),
        ("resume", "\udcff"),
        ("jobs", "--model", "\udcff"),
        ("workers", "--model", "\udcff"),
        ("results", "x", "--format", "xml"),
        ("results", "x", "--json"),
        ("jobs", "--redis", "http://user:secret@localhost"),
        ("jobs", "--redis", "redis://user:secret@localhost:port"),
        ("jobs", "--redis", "redis://\udcff"),
        ("jobs", "--redis", "redis://a..b"),
        ("worker",),
        ("worker", "--model", "\udcff"),
        ("worker", "--model", "demo", "--served-model-name", "\udcff"),
        ("worker", "--model", "demo", "--allow-root", "\udcff"),
        ("run", "in.jsonl", "--model", "\udcff"),
        ("run", "in.jsonl", "--model", "demo", "--served-model-name", "\udcff"),
    ],
)
def test_bad_usage(run_cli: RunCli, tmp_path: Path, args: tuple[str, ...]) -> None:
    write_rows(tmp_path / "in.jsonl", ["a"])
    result = run_cli(*args, code=2)
    assert "Error: " in result.stderr
    assert "secret" not in result.output


@pytest.mark.parametrize("option", ["--json-schema", "--tools"])
def test_files_of_options_are_read_up_to_a_bound(run_cli: RunCli, tmp_path: Path, option: str) -> None:
    """As /dev/zero is, which has no end."""
    source, file = write_rows(tmp_path / "in.jsonl", ["a"]), tmp_path / "large.json"
    file.touch()
    os.truncate(file, MAX_FILE_BYTES + 1)
    refused = run_cli("submit", source, "--model", "m", option, file, code=2)
    assert f"Error: Invalid value for '{option}': {file} holds more than 16 MiB" in refused.stderr


def test_a_schema_may_come_from_a_pipe() -> None:
    """As from a shell's <(...)."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        file.write('{"type": "object"}')
    assert schema_file(f"/dev/fd/{reader}") == {"type": "object"}
    os.close(reader)


def test_a_job_id_is_refused_before_a_folder_is_named_by_it(run_cli: RunCli, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    for odd in ("\udcff", "../x"):
        result = run_cli("submit", source, "--model", "m", "--job-id", odd, code=2)
        assert result.stderr.splitlines()[-1].startswith("Error: --job-id: must be ")


@pytest.mark.parametrize(
    ("source", "option", "value"),
    [
        ("in.jsonl", "--stop", "\udcff"),
        ("in.jsonl", "--system", "\udcff"),
        ("in.jsonl", "--template", "{prompt}\udcff"),
        ("in.jsonl", "--prompt-column", "\udcff"),
        ("in.jsonl", "--messages-column", "\udcff"),
        ("in.jsonl", "--keep-columns", "a,\udcff"),
        ("in.jsonl", "--output", "out-\udcff"),
        ("\udcff.jsonl", "--output", "out"),
        ("folder", "--output", "out"),
    ],
)
def test_what_is_not_utf8(run_cli: RunCli, tmp_path: Path, source: str, option: str, value: str) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("in.jsonl", "\udcff.jsonl", "folder/\udcff.jsonl"):
        write_rows(tmp_path / name, ["a"])
    error = run_cli("submit", source, "--model", "m", option, value, code=2).stderr.splitlines()[-1]
    assert "isn't valid Unicode" in error
    assert error.startswith(f"Error: {option}: " if "\udcff" in value else "Error: '")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("run", "worker", "bench")])
def test_a_redis_that_is_away(command: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    args = {"submit": [str(source), "--model", "m", "-o", str(tmp_path / "out")], "pause": ["m"], "resume": ["m"]}
    args |= {name: ["some-job"] for name in OF_A_JOB}
    url = f"unix://user:secret@{tmp_path}/nothing.sock"
    result = CliRunner().invoke(cli, [command, *args.get(command, []), "--redis", url])
    assert result.exit_code == 4
    assert result.stderr.splitlines()[-1].startswith("Error: Redis at unix://")
    assert "can't be reached" in result.stderr
    assert "secret" not in result.output


@pytest.mark.parametrize("command", [name for name in OF_A_JOB if name != "purge"])
def test_a_job_of_another_release(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], command: str
) -> None:
    job_id = submit(["a"])
    key = QueueKeys(queue_name(MODEL)).job(job_id)
    client.hset(key, "schema", 99)
    result = run_cli(command, job_id, code=5)
    assert result.stderr.startswith(f"Error: job {job_id} was written by a newer release (schema 99,")
    assert len(result.stderr.splitlines()) == 1
    assert "not listed: job" in run_cli("jobs").stderr
    client.hset(key, "schema", 1)
    with Client() as api:
        api.job(job_id).cancel()


def test_what_others_wrote_into_redis_hides_nothing(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]
) -> None:
    queue = QueueKeys(queue_name(MODEL))
    client.hset(QUEUES, b"\xff", "model")
    client.set(queue.worker("ghost"), "garbage", px=60_000)
    client.set(queue.job("planted"), "text")
    client.zadd(queue.part("workers"), {"ghost": 9e15})
    job_id = submit(["a"])
    client.zadd(queue.part("jobs"), {"planted": 9e15})
    for command in (("jobs",), ("status",), ("status", job_id), ("workers",)):
        result = run_cli(*command)
        assert (job_id in result.stdout) == (command != ("workers",))
        assert "warning: not listed: mb:queues (field \\xff) in Redis is no record of minisgl-batch" in result.stderr
    for command in ("status", "tail", "results", "cancel", "retry"):
        error = run_cli(command, "planted", code=1).stderr.splitlines()[-1]
        assert error == f"Error: {queue.job('planted')} in Redis is no record of minisgl-batch: remove it"
    run_cli("cancel", job_id)
    run_cli("purge", "planted")
    assert not client.exists(queue.job("planted"))
    client.delete(queue.part("workers"))


def test_what_others_wrote_is_shown_harmlessly(run_cli: RunCli, tmp_path: Path) -> None:
    evil = "m\x1b]0;pwned\x07\nline"
    source = write_rows(tmp_path / "evil.jsonl", ["a"])
    job_id = run_cli("submit", source, "--model", evil).stdout.strip()
    for command in (("status", job_id), ("jobs",), ("status",)):
        result = run_cli(*command)
        assert "\x1b" not in result.output
        assert "\\x1b]0;pwned\\x07\\nline" in result.stdout
    assert json.loads(run_cli("jobs", "--json").stdout)[0]["model"] == evil
    run_cli("cancel", job_id)


@pytest.mark.parametrize("command", ["jobs", "tail {job} --json", "results {job} --format csv"])
def test_a_pipe_that_closes_early(client: redis.Redis, submit: Callable[..., str], command: str) -> None:
    with EchoWorker(client):
        job_id = submit([f"{i} " + "x" * 1000 for i in range(200)], "--wait")
    program = f"{sys.executable} -m minisgl_batch.cli.main {command.format(job=job_id)} | head -1"
    result = subprocess.run(program, shell=True, capture_output=True, text=True, check=True, env=environment())
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["jobs --json", "results {job}", "tail {job}", "--help", "jobs --help", "none"])
def test_an_output_that_nobody_reads(client: redis.Redis, submit: Callable[..., str], command: str) -> None:
    """The exit code is that of commands which SIGPIPE ends."""
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    reading, writing = os.pipe()
    os.close(reading)
    args = [sys.executable, "-m", "minisgl_batch.cli.main", *command.format(job=job_id).split()]
    stderr = writing if command == "none" else subprocess.PIPE  # where the error goes that there is no such command
    with os.fdopen(writing):
        result = subprocess.run(args, stdout=writing, stderr=stderr, text=True, check=False, env=environment())
    assert (result.returncode, result.stderr or "") == (141, "")


@pytest.mark.parametrize("command", ["jobs --json", "results {job}", "tail {job}", "--help"])
def test_an_output_that_is_full(client: redis.Redis, submit: Callable[..., str], tmp_path: Path, command: str) -> None:
    """A limit on file sizes makes writes fail as a full disk does."""
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    program = """
        import resource
        from minisgl_batch.cli.main import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        main()
    """
    args = [sys.executable, "-c", textwrap.dedent(program), *command.format(job=job_id).split()]
    with (tmp_path / "output").open("wb") as full:
        result = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment())
    assert result.returncode == 1
    assert result.stderr.endswith("Error: the output can't be written: File too large\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["tail", "retry --wait", "cancel --wait", "status --watch"])
def test_an_interrupt_ends_each_wait_in_order(client: redis.Redis, submit: Callable[..., str], command: str) -> None:
    job_id = submit(["a", "fail"])
    name, *options = command.split()
    if name == "retry":
        with EchoWorker(client), Client() as api:
            api.job(job_id).wait(20)
    with EchoWorker(client, hold=True) if name == "cancel" else Client() as held:
        if name == "cancel":
            # A worker that is silent: the job stays canceling.
            queue = QueueKeys(queue_name(MODEL))
            client.hset(queue.job(job_id, "live"), "0", "token 1 silent")
            client.zadd(queue.part("lease"), {f"{job_id}|0": 9e15})
        with Command(name, job_id, *options) as view:
            view.wait_for({"tail": "waiting", "retry": "queued:", "cancel": "canceling:", "status": "state"}[name])
            view.signal(signal.SIGINT)
            view.finish(code=130)
        assert view.stderr.splitlines()[-1] == "interrupted"
        assert "Traceback" not in view.stderr
        if name == "cancel":
            client.zrem(queue.part("lease"), f"{job_id}|0")
        assert held is not None
    with Client() as api:
        if not api.job(job_id).status().state.is_final:
            api.job(job_id).cancel()
            api.job(job_id).wait(20)


def test_json_errors_go_to_standard_error_only(run_cli: RunCli) -> None:
    for command in (("status", "x", "--json"), ("cancel", "x", "--json"), ("tail", "x", "--json")):
        assert run_cli(*command, code=3).stdout == ""


def test_events_as_json(run_cli: RunCli, client: redis.Redis, submit: Callable[..., str]) -> None:
    with EchoWorker(client):
        job_id = submit([{"prompt": "a\n", "custom_id": "c"}, "fail"])
        events = [msgspec.json.decode(line) for line in run_cli("tail", job_id, "--json", code=1).stdout.splitlines()]
    assert events[-1] == {"event": "job", "state": "partial"}
    texts = [event["text"] for event in events if event["event"] == "text"]
    assert "".join(texts) == "echo a\n"
    (ok,) = [event for event in events if event["event"] == "finished" and event["status"] == "ok"]
    assert (ok["row_index"], ok["custom_id"], ok["finish_reason"]) == (0, "c", "stop")
    (failed,) = [event for event in events if event["event"] == "finished" and event["status"] == "error"]
    assert failed["error"] == {"type": "refused", "message": "the prompt asks for it"}


def test_a_summary_of_written_results(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
    target = str(tmp_path / "r.jsonl")
    assert json.loads(run_cli("results", job_id, "-o", target, "--json").stdout) == {
        "job_id": job_id,
        "state": "finished",
        "num_results": 1,
        "output": target,
    }


def test_completion_knows_commands_and_jobs(submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit(["a"], "--job-id", "my-job")
    completing = ShellComplete(cli, {}, "minisgl-batch", "_MINISGL_BATCH_COMPLETE")

    def complete(*words: str) -> list[str]:
        return [item.value for item in completing.get_completions(list(words[:-1]), words[-1])]

    assert complete("can") == ["cancel"]
    for command in OF_A_JOB:
        assert complete(command, "my") == [job_id]
        assert complete(command, "x") == []
    assert complete("submit", "in.jsonl", "--after", "my") == [job_id]
    with Client() as api:
        api.job(job_id).cancel()
    monkeypatch.setenv("MINISGL_REDIS", "unix:///nowhere/redis.sock")
    assert complete("cancel", "my") == []
    monkeypatch.delenv("MINISGL_REDIS")
    monkeypatch.setenv("XDG_STATE_HOME", "/nowhere")
    assert complete("cancel", "my") == []
