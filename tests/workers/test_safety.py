"""A shared worker, as processes: what it may read and write, what it runs, and what its log tells."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from minisgl_batch.client import Client
from minisgl_jobs import tasks
from minisgl_jobs.connection import connect
from minisgl_jobs.keys import queue_name
from minisgl_jobs.model import InputReference, JobState
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.submission import prepare
from minisgl_jobs.tasks import task_queue
from tests.jobs.helpers import wait_for
from tests.jobs.tcp_server import running
from tests.processes import Command
from tests.workers.echo_group import MODEL, EchoGroupConfig

SECRET = "s3cr3t-of-the-test"
READY_S = 60.0


class Bomb:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server that wants a password."""
    with running("--requirepass", SECRET) as port:
        yield port


@pytest.fixture(scope="module")
def url(port: int) -> str:
    return f"redis://:{SECRET}@127.0.0.1:{port}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker may use."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def worker(url: str, root: Path) -> Iterator[Command]:
    config = EchoGroupConfig(redis_url=url, allow_roots=(str(root), "memory://bucket/prefix"))
    command = Command(
        msgspec.json.encode(config).decode(), module="tests.workers.echo_group", MINISGL_LOG_LEVEL="DEBUG"
    )
    with command:
        command.wait_for("serving", READY_S)
        yield command
        command.signal(signal.SIGTERM)
        command.finish()
        assert SECRET not in command.stderr + command.stdout


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.mark.usefixtures("worker")
def test_a_job_under_the_root_is_served(client: Client, root: Path) -> None:
    (root / "in.jsonl").write_text('{"prompt": "a"}\n')
    job = client.submit(root / "in.jsonl", model=MODEL, output=root / "out", max_tokens=2, transport="reference")
    wait_for("the end of the job", lambda: job.status().state is JobState.FINISHED, 60)


@pytest.mark.parametrize("output", ["elsewhere", "root/link/out"])
def test_nothing_is_written_outside_the_root(
    worker: Command, client: Client, root: Path, tmp_path: Path, output: str
) -> None:
    """Neither by the frontend nor, once the job is canceled, by the task that writes its manifest."""
    (tmp_path / "elsewhere").mkdir()
    (root / "link").unlink(missing_ok=True)
    (root / "link").symlink_to(tmp_path / "elsewhere")
    folder = root / "link" / "out" if output.startswith("root") else tmp_path / output
    job = client.submit(["a"], model=MODEL, output=folder, max_tokens=2)
    wait_for("the refusal", lambda: "may not be written by this worker" in job.status().waiting, 60)
    job.cancel()
    wait_for("the task's refusal", lambda: "may not be written by this worker" in job.status().error, 60)
    assert os.listdir(folder) == ["_JOB"]  # the client's
    assert f"job {job.id} is left to other workers" in worker.stderr


@pytest.mark.parametrize("source", ["file:///etc/hostname", "/etc/hostname", "memory://bucket/other"])
def test_nothing_is_read_outside_the_root(client: Client, root: Path, source: str, port: int) -> None:
    """A client that submits another reference than it has read."""
    (root / "x.jsonl").write_text('{"prompt": "a"}\n')
    output = root / f"out-{abs(hash(source))}"
    with prepare(root / "x.jsonl", model=MODEL, output=output, transport="reference") as submission:
        spec = msgspec.structs.replace(submission.spec, reference=InputReference(source))
        queue = JobQueue(redis.Redis(port=port, password=SECRET))
        queue.create(spec)
        queue.append(spec, dict(submission.payloads()))
        queue.seal(spec)
    job = client.job(spec.job_id)
    wait_for("the refusal", lambda: "may not be read by this worker" in job.status().waiting, 60)
    job.cancel()
    wait_for("its end", lambda: job.status().state is JobState.CANCELED, 60)


@pytest.mark.parametrize(
    "kind", ["a pickle", "os.system", "tests.workers.test_safety.Bomb", "minisgl_jobs.tasks.finalise"]
)
def test_a_planted_task_is_refused_and_logged_and_work_goes_on(
    worker: Command, client: Client, url: str, root: Path, tmp_path: Path, kind: str
) -> None:
    marker = tmp_path / "gone-off"
    data = json.dumps([kind, None, [f"touch {marker}"], {}]).encode()
    if kind == "a pickle":
        data = pickle.dumps(("os.getpid", None, (Bomb(marker),), {}))
    connection = connect(url)
    queue = task_queue(connection, queue_name(MODEL))
    task = queue.create_job(tasks.FINALISE, args=("q", "none", 0), result_ttl=60, failure_ttl=60)
    task.save()
    connection.hset(task.key, "data", data)
    connection.rpush(queue.key, task.id)
    wait_for("the refusal", lambda: task.get_status(refresh=True) == "failed", 60)
    assert not marker.exists()
    if kind != "a pickle":
        assert f"refused RQ task {task.id}: '{kind}'" in worker.stderr
    else:
        worker.wait_for(task.id)
    job = client.submit(["a"], model=MODEL, output=root / f"after-{task.id}", max_tokens=2)
    wait_for("the end of the job", lambda: job.status().state is JobState.FINISHED, 60)


def test_no_password_in_logs_and_errors(worker: Command, client: Client, port: int, root: Path) -> None:
    """While connections break and are made again; `worker` looks at the rest at its end."""
    admin = redis.Redis(port=port, password=SECRET)
    admin.client_kill_filter(_type="normal", skipme=True)
    admin.client_kill_filter(_type="pubsub")
    job = client.submit(["a"], model=MODEL, output=root / "later", max_tokens=2)
    wait_for("the end of the job", lambda: job.status().state is JobState.FINISHED, 60)
    admin.close()
    assert SECRET not in worker.stderr


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (4, ("jobs", "--redis", f"redis://:wrong-{SECRET}@127.0.0.1:PORT")),
        (2, ("jobs", "--redis", f"redis://user:{SECRET}@127.0.0.1:x")),
        (4, ("jobs", "--redis", f"redis+sentinel://user:{SECRET}@127.0.0.1:PORT/service")),
        (2, ("submit", f"s3://user:{SECRET}@bucket/x", "--model", "m")),
    ],
)
def test_no_password_in_errors_of_the_command_line(port: int, code: int, arguments: tuple[str, ...]) -> None:
    given = [argument.replace("PORT", str(port)) for argument in arguments]
    with Command(*given, MINISGL_LOG_LEVEL="DEBUG") as command:
        command.finish(code)
    assert "Error: " in command.stderr
    assert SECRET not in command.stderr + command.stdout


def test_a_root_that_is_none_is_refused() -> None:
    with Command("worker", "--model", "demo", "--allow-root", "s3://bucket/../x") as command:
        command.finish(code=2)
    assert "--allow-root" in command.stderr
    assert "must be a folder or a plain URL" in command.stderr
