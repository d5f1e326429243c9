"""A whole worker group: which processes it has, and running it under a supervisor. Called by the command line."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from minisgl_batch.child_process import ChildPlan
from minisgl_batch.distributed.place import FOLLOWER, FollowerConfig, places_on_node, places_on_this_host
from minisgl_jobs.connection import connect
from minisgl_jobs.roots import SEPARATOR, VARIABLE, AllowedRoots
from minisgl_workers.options import FrontendConfig, RankConfig, TaskRunnerConfig, WorkerOptions
from minisgl_workers.supervisor import GroupPlan, Supervisor

# A service in the background must not spin while it waits for its other threads: on a busy machine that costs far more
# than it gains on a quiet one.
_RANK_ENV = {"OMP_WAIT_POLICY": "passive"}


def group_children(options: WorkerOptions, directory: Path) -> list[ChildPlan]:
    """The processes of a group on this host, the frontend first if it is here; their sockets are in `directory`."""
    if options.node is not None and options.node.rank > 0:
        return _ranks(options, directory)
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    sockets = str(directory)
    roots = {VARIABLE: SEPARATOR.join(options.allow_roots)}
    tasks = TaskRunnerConfig(options.redis_url, options.model, worker_id)
    return [
        ChildPlan("frontend", "minisgl_workers.frontend", FrontendConfig(options, worker_id, sockets)),
        *_ranks(options, directory),
        ChildPlan("tasks", "minisgl_workers.task_runner", tasks, roots, is_spare=True),
    ]


def _ranks(options: WorkerOptions, directory: Path) -> list[ChildPlan]:
    """This host's ranks."""
    engine, node = options.engine, options.node
    env = {name: value for name, value in _RANK_ENV.items() if name not in os.environ}
    if node is None:
        places = places_on_this_host(engine.tp, directory)
    else:
        places = places_on_node(engine.tp, node.num_nodes, node.rank, node.rendezvous)
    plans = []
    for place in places:
        if place.rank == 0:
            first = RankConfig(engine, place if engine.tp > 1 else None, str(directory))
            plans.append(ChildPlan("rank 0", "minisgl_workers.rank", first, env))
        else:
            follower = FollowerConfig(engine, place, in_worker=True, heeds_sigterm=places[0].rank > 0)
            plans.append(ChildPlan(f"rank {place.rank}", FOLLOWER, follower, env))
    return plans


def run_worker(
    options: WorkerOptions,
    on_ready: Callable[[dict[str, dict[str, Any]]], None],
    children: Callable[[WorkerOptions, Path], list[ChildPlan]] = group_children,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        children: what the group consists of.
        on_ready: called with the ready information of each process, by name, whenever the group serves.

    Raises:
        WorkerError: the group couldn't start, or died too often.
        ModelError: there is no such model, or it can't be run.
        InvalidParameterError: an allowed root is no folder or URL, or the model can't be split over so many ranks.
        RedisUnavailableError: there is no such Redis.
    """
    # A wrong name, model, size or URL shows here, before weights are downloaded and any process starts.
    AllowedRoots(options.allow_roots)
    options = options.fetched()
    if options.node is None or options.node.rank == 0:
        connect(options.redis_url).close()

    plan = GroupPlan(partial(children, options), on_ready, drain_s=options.drain_s, hang_s=options.hang_s)
    Supervisor(plan).run()
