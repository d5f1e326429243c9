"""How soon a killed worker's chunks are taken over, and whether finished rows are generated again.

    python -m tests.bench takeover [--kills 30] [--lease-s 3] [--save]

Two groups with an engine that echoes serve one job. At random moments a frontend, a rank or a supervisor gets a
SIGKILL; the clock runs until none of the chunks that its group had is its any more.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from pathlib import Path

from minisgl_batch.client import Client, JobHandle
from tests.bench.records import record
from tests.chaos.attack import after_their_end
from tests.chaos.world import JOB, World
from tests.jobs.helpers import wait_for

KINDS = ("frontend", "rank", "supervisor")
TAKEOVER_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--lease-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--save", action="store_true", help="append to tests/bench/results/takeover.jsonl")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="mb-") as folder:
        sizes = {"num_rows": 200_000, "chunk_rows": 64}
        with World(Path(folder), **sizes, lease_s=options.lease_s, step_s=0.05) as world:
            with world.start_submit() as command:
                command.finish(timeout_s=120)
            with Client(world.server.url) as client:
                job = client.job(JOB)
                times = sorted(strike(world, job, rng) for _ in range(options.kills))
                job.cancel()
                wait_for("the end of the job", lambda: job.status().state.is_final, TAKEOVER_S)
            again, num_begun = after_their_end(world, world.ended), sum(1 for _ in world.read_log(world.begun))
    measured = {
        "kills": options.kills,
        "lease_s": options.lease_s,
        "seed": options.seed,
        "takeover_s_p50": round(times[len(times) // 2], 2),
        "takeover_s_max": round(times[-1], 2),
        "rows_begun": num_begun,
        "finished_rows_generated_again": len(again),
    }
    record("takeover", measured, save=options.save)


def strike(world: World, job: JobHandle, rng: random.Random) -> float:
    """Kill a process of a group that has chunks; the seconds until it has none of them."""
    pids = wait_for("both groups to work", lambda: pids_at_work(job) if len(pids_at_work(job)) == 2 else None, 120)
    time.sleep(rng.uniform(0, 1))
    number = rng.randrange(2)
    pid = world.groups[number].pid
    assert pid in pids, (pid, pids)
    kind = rng.choice(KINDS)
    process = None if kind == "supervisor" else world.find(number, kind)
    held = {(lease.worker_id, lease.chunk) for lease in job.status().leases if pid_of(lease.worker_id) == pid}
    if process is None:
        world.groups[number].signal(signal.SIGKILL)
        world.old_groups.append(world.groups[number])
        world.groups[number] = world.start_group()
    else:
        process.kill()
    killed = time.monotonic()

    def is_taken_over() -> bool:
        return not held & {(lease.worker_id, lease.chunk) for lease in job.status().leases}

    wait_for("the takeover", is_taken_over, TAKEOVER_S)
    return time.monotonic() - killed


def pids_at_work(job: JobHandle) -> set[int]:
    """Supervisors of groups that have chunks."""
    return {pid_of(lease.worker_id) for lease in job.status().leases}


def pid_of(worker_id: str) -> int:
    """The supervisor's process id in a worker's name."""
    return int(worker_id.split("-")[-2])


if __name__ == "__main__":
    main()
