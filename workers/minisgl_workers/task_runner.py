"""The RQ worker process of a group: finalise and other short tasks of its model's queue."""

from __future__ import annotations

import logging
import secrets

from minisgl_batch.child_process import StatusPipe, run_child
from minisgl_jobs.keys import queue_name
from minisgl_jobs.tasks import make_task_worker
from minisgl_workers.options import TaskRunnerConfig
from minisgl_workers.reconnect import connect_patiently


def main(config: TaskRunnerConfig, status: StatusPipe) -> None:
    logging.getLogger("rq").setLevel(logging.WARNING)
    client = connect_patiently(config.redis_url)
    # RQ remembers a killed worker for some minutes and allows no second one of its name.
    name = f"{config.worker_id}-tasks-{secrets.token_hex(2)}"
    worker = make_task_worker(client, [queue_name(config.model)], name=name)
    status.ready()
    worker.work(logging_level="WARNING")


if __name__ == "__main__":
    run_child("tasks", TaskRunnerConfig, main)
