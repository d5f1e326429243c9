"""RQ tasks: finalise is fired from the outbox and run by a real RQ worker; everything else is refused."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.job import Job, JobStatus

from minisgl_batch.errors import TaskRefusedError
from minisgl_jobs import tasks
from minisgl_jobs.connection import connect
from minisgl_jobs.keys import queue_name
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.model import JobState
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.tasks import AllowListJob, TaskQueue, dispatch_finalise, make_task_worker, task_queue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, make_spec, submit, wait_for

QUEUE = queue_name(MODEL)


class Bomb:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture
def rq_client(redis_server: EmbeddedRedis, client: redis.Redis) -> redis.Redis:
    """A connection for RQ, which changes its time limits; `client` empties Redis before and checks it after."""
    assert client.ping()
    return connect(redis_server.url)


def work(client: redis.Redis) -> None:
    """Do what is in the queue in a forked work horse, as in production."""
    make_task_worker(client, [QUEUE], "worker-under-test").work(burst=True, logging_level="ERROR")


def canceled_job(client: redis.Redis, folder: Path) -> str:
    queue = JobQueue(client)
    spec = submit(queue, make_spec(output=str(folder / "out")))
    queue.cancel(spec.job_id)
    return spec.job_id


def test_a_job_is_finalised_by_an_rq_worker(rq_client: redis.Redis, client: redis.Redis, tmp_path: Path) -> None:
    job_id = canceled_job(client, tmp_path)
    outbox, queue = Outbox(client, QUEUE), task_queue(rq_client, QUEUE)
    assert dispatch_finalise(outbox, queue) == 1
    assert dispatch_finalise(outbox, queue) == 0
    assert queue.job_ids == [f"finalise-{job_id}-0"]
    stored: Any = client.hget(f"rq:job:finalise-{job_id}-0", "data")
    assert json.loads(zlib.decompress(stored)) == [tasks.FINALISE, None, [QUEUE, job_id, 0], {}]
    work(rq_client)
    assert JobQueue(client).status(job_id).state is JobState.CANCELED
    task = AllowListJob.fetch(f"finalise-{job_id}-0", connection=rq_client)
    assert task.get_status() == JobStatus.FINISHED
    assert dispatch_finalise(outbox, queue) == 0


def test_an_entry_that_is_due_again_is_fired_again_unless_its_task_waits_or_runs(
    rq_client: redis.Redis, client: redis.Redis, tmp_path: Path
) -> None:
    job_id = canceled_job(client, tmp_path)
    outbox, queue = Outbox(client, QUEUE), task_queue(rq_client, QUEUE)
    assert dispatch_finalise(outbox, queue) == 1
    fin = ChunkQueue(client, MODEL, "w").keys.part("fin")

    def fire_again() -> int:
        client.zadd(fin, {job_id: 0}, xx=True)  # its time is over
        return dispatch_finalise(outbox, queue)

    assert fire_again() == 0  # it waits in RQ's queue
    task = AllowListJob.fetch(f"finalise-{job_id}-0", connection=rq_client)
    queue.pop_job_id()
    assert fire_again() == 1  # whoever took it died before it had begun
    queue.pop_job_id()
    task.set_status(JobStatus.STARTED)
    client.hset(task.key, "last_heartbeat", "2200-01-01T00:00:00.000000Z")
    assert fire_again() == 0  # it runs
    client.hset(task.key, "last_heartbeat", "2020-01-01T00:00:00.000000Z")
    assert fire_again() == 1  # its worker is dead
    work(rq_client)
    assert JobQueue(client).status(job_id).state is JobState.CANCELED


def test_a_killed_task_worker_is_made_up_for(
    rq_client: redis.Redis, client: redis.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The task is taken off RQ's queue and its worker is gone: the outbox fires it again."""
    job_id = canceled_job(client, tmp_path)
    outbox, queue = Outbox(client, QUEUE), task_queue(rq_client, QUEUE)
    dispatch_finalise(outbox, queue)
    code = (
        "import sys, time\n"
        "from minisgl_jobs import tasks\n"
        "from minisgl_jobs.connection import connect\n"
        "tasks.finalise = lambda *_, **__: time.sleep(600)\n"
        "tasks.make_task_worker(connect(sys.argv[1]), [sys.argv[2]], 'victim').work(burst=True)\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    victim = subprocess.Popen(
        [sys.executable, "-c", code, redis_server.url, QUEUE],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    task = AllowListJob.fetch(f"finalise-{job_id}-0", connection=rq_client)
    wait_for("the task to start", lambda: task.get_status() == JobStatus.STARTED, 30)
    horse = wait_for("the work horse", lambda: _children(victim.pid))
    for pid in [*horse, victim.pid]:
        os.kill(pid, signal.SIGKILL)
    victim.wait(10)
    client.hset(task.key, "last_heartbeat", "2020-01-01T00:00:00.000000Z")
    client.zadd(ChunkQueue(client, MODEL, "w").keys.part("fin"), {job_id: 0}, xx=True)
    assert dispatch_finalise(outbox, queue) == 1
    work(rq_client)
    assert JobQueue(client).status(job_id).state is JobState.CANCELED


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


# --- what is planted in Redis is not run -----------------------------------------------------------------------------


def plant(client: redis.Redis, queue: TaskQueue, **fields: Any) -> str:
    """Put a task into RQ's queue as an attacker would."""
    task = queue.enqueue_call(tasks.FINALISE, args=("q", "no-such-job", 0), job_id="planted")
    client.hset(task.key, mapping=fields)
    return str(task.id)


def refused(client: redis.Redis) -> bool:
    """Run the queue; whether the task failed."""
    work(client)
    return bool(AllowListJob.fetch("planted", connection=client).get_status() == JobStatus.FAILED)


@pytest.mark.parametrize("field", ["data", "meta", "result"])
def test_a_planted_pickle_is_never_loaded(rq_client: redis.Redis, tmp_path: Path, field: str) -> None:
    bomb = pickle.dumps(("os.getpid", None, (Bomb(tmp_path / "gone-off"),), {}))
    plant(rq_client, task_queue(rq_client, QUEUE), **{field: bomb})
    assert refused(rq_client)
    assert not (tmp_path / "gone-off").exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "minisgl_jobs.tasks.finalise", "subprocess.run", ""])
def test_a_planted_function_name_is_refused_and_logged(
    rq_client: redis.Redis, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "run"
    plant(rq_client, task_queue(rq_client, QUEUE), data=json.dumps([name, None, [f"touch {marker}"], {}]))
    assert refused(rq_client)
    assert not marker.exists()
    task = AllowListJob.fetch("planted", connection=rq_client)
    with caplog.at_level(logging.ERROR), pytest.raises(TaskRefusedError, match="not allowed"):
        task.perform()
    assert f"refused RQ task planted: {name!r}" in caplog.text


def test_a_planted_instance_is_refused(rq_client: redis.Redis) -> None:
    data = json.dumps([tasks.FINALISE, {"any": "thing"}, [QUEUE, "no-such-job", 0], {}])
    plant(rq_client, task_queue(rq_client, QUEUE), data=data)
    assert refused(rq_client)


@pytest.mark.parametrize("kind", ["success_callback_name", "failure_callback_name", "stopped_callback_name"])
def test_planted_callbacks_are_not_called(
    rq_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "planted_module.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\ndef run(*_): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plant(rq_client, task_queue(rq_client, QUEUE), **{kind: "planted_module.run"})
    assert refused(rq_client)
    assert not (tmp_path / "imported").exists()


def test_planted_webhooks_are_not_sent(rq_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = [{"url": "http://127.0.0.1:9/", "job_status": "failed", "headers": {}, "timeout": 1}]
    plant(rq_client, task_queue(rq_client, QUEUE), webhooks=json.dumps(hook))
    monkeypatch.setattr("urllib.request.urlopen", _refuse_to_send)
    assert refused(rq_client)
    task = AllowListJob.fetch("planted", connection=rq_client)
    task.send_webhooks("failed")


def test_entries_that_are_no_tasks_are_dropped_and_the_next_ones_run(
    rq_client: redis.Redis, client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = canceled_job(client, tmp_path)
    queue = task_queue(rq_client, QUEUE)
    client.set("rq:job:wrong-type", "x", ex=60)
    client.hset("rq:job:odd-status", mapping={"data": "x", "status": "odd"})
    odd = [b"\xff\xfe", "wrong-type", "odd-status", "a:b c", "gone"]
    client.rpush(queue.key, *odd)
    dispatch_finalise(Outbox(client, QUEUE), queue)
    with caplog.at_level(logging.ERROR):
        work(rq_client)
    assert JobQueue(client).status(job_id).state is JobState.CANCELED
    assert client.llen(queue.key) == 0
    assert "that is no task: b'\\xff\\xfe'" in caplog.text
    client.delete("rq:job:odd-status")


def test_a_finalise_task_that_others_have_spoiled_is_made_anew(
    rq_client: redis.Redis, client: redis.Redis, tmp_path: Path
) -> None:
    job_id = canceled_job(client, tmp_path)
    client.set(f"rq:job:finalise-{job_id}-0", "x")
    assert dispatch_finalise(Outbox(client, QUEUE), task_queue(rq_client, QUEUE)) == 1
    work(rq_client)
    assert JobQueue(client).status(job_id).state is JobState.CANCELED


def _refuse_to_send(*_: Any, **__: Any) -> None:
    raise AssertionError("a webhook was sent")


def test_the_pickling_default_cannot_come_back(rq_client: redis.Redis, tmp_path: Path) -> None:
    """The stock classes with their defaults do load it, so this is a test that can fail."""
    bomb = pickle.dumps({"x": Bomb(tmp_path / "gone-off")})
    plant(rq_client, task_queue(rq_client, QUEUE), meta=bomb)
    AllowListJob.fetch("planted", connection=rq_client, serializer=pickle)
    assert not (tmp_path / "gone-off").exists()
    Job.fetch("planted", connection=rq_client)
    assert (tmp_path / "gone-off").exists()
    rq_client.delete("rq:job:planted")
