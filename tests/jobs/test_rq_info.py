"""The stock `rq info` shows a running system's tasks as they are, and changes nothing of them."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import redis

from minisgl_batch.client import Client
from minisgl_jobs.connection import connect
from minisgl_jobs.keys import queue_name
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.tasks import dispatch_finalise, make_task_worker, task_queue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.processes import environment

MODEL = "some/model"
QUEUE = queue_name(MODEL)


def rq_info(url: str, *options: str) -> str:
    command = [sys.executable, "-m", "rq.cli", "info", "--url", url, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment(NO_COLOR="1")).stdout


def rq_keys(client: redis.Redis) -> dict[str, Any]:
    """What RQ keeps of tasks, as JSON-like values; a pickle anywhere fails."""
    connection: Any = client
    found: dict[str, Any] = {}
    for key in sorted(connection.scan_iter("rq:job:*")):
        fields = connection.hgetall(key)
        data = json.loads(zlib.decompress(fields[b"data"]))
        meta = json.loads(fields[b"meta"]) if fields.get(b"meta") else {}
        found[key.decode()] = (data, meta, fields[b"description"].decode(), fields[b"status"].decode())
    return found


def test_rq_info_shows_the_tasks_of_a_running_system(
    api: Client, client: redis.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    rq_client = connect(redis_server.url)
    tasks, outbox = task_queue(rq_client, QUEUE), Outbox(client, QUEUE)
    worker = make_task_worker(rq_client, [QUEUE], "group-1-tasks")
    first = api.submit(["a"], model=MODEL, output=tmp_path / "1")
    api.submit(["a"], model=MODEL, output=tmp_path / "2", job_id="second", after=first.id)
    api.submit(["a"], model=MODEL, output=tmp_path / "3", job_id="late", start_at=datetime.now() + timedelta(days=9))
    done = api.submit(["a"], model=MODEL, output=tmp_path / "4", job_id="done")
    _cancel(client, done.id)
    dispatch_finalise(outbox, tasks)
    worker.work(burst=True, logging_level="ERROR")
    worker.register_birth()
    waiting = api.submit(["a"], model=MODEL, output=tmp_path / "5", job_id="waiting")
    _cancel(client, waiting.id)
    assert dispatch_finalise(outbox, tasks) == 1

    before = rq_keys(client)
    shown = rq_info(redis_server.url)
    assert f"minisgl-{QUEUE} |" in shown
    assert " 1, 0 executing, 1 finished, 0 failed" in shown
    assert "1 queues, 1 jobs total" in shown
    assert "group-1-tasks" in shown
    assert "1 workers, 1 queues" in shown
    assert f"minisgl-{QUEUE}: group-1-tasks (" in rq_info(redis_server.url, "--by-queue")
    assert rq_keys(client) == before
    assert {(description, status) for _, _, description, status in before.values()} == {
        ("finalise done", "finished"),
        ("finalise waiting", "queued"),
        (f"start second after {first.id}", "deferred"),
        ("start late", "scheduled"),
    }
    assert {name for (name, *_), *_ in before.values()} == {
        "minisgl_jobs.tasks.run_finalise",
        "minisgl_jobs.tasks.run_start",
    }
    worker.register_death()
    for job in ("second", "late"):
        _cancel(client, job)
    first.cancel()
    for job in ("second", "late", "waiting"):
        api.job(job).wait(10)


def _cancel(client: redis.Redis, job_id: str) -> None:
    """Cancel a job, and leave its end to RQ."""
    JobQueue(client).cancel(job_id)
