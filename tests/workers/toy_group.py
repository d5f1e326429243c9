"""A supervisor with toy children: python -m tests.workers.toy_group FOLDER HANG_S MAX_FAILURES. It reports in words."""

from __future__ import annotations

import sys
from pathlib import Path

from minisgl_batch.child_process import ChildPlan, setup_logging
from minisgl_batch.errors import WorkerError
from minisgl_workers.supervisor import GroupPlan, Supervisor
from tests.workers.toy_child import ToyConfig

NAMES = ("frontend", "rank", "tasks")


def main(folder: str, hang_s: str, max_failures: str) -> int:
    setup_logging("worker")
    starts = Path(folder) / "starts"

    def children(sockets: Path) -> list[ChildPlan]:
        starts.write_text((starts.read_text() if starts.exists() else "") + f"{sockets}\n")
        return [
            ChildPlan(
                name, "tests.workers.toy_child", ToyConfig(name, folder, str(sockets)), is_spare=name == NAMES[-1]
            )
            for name in NAMES
        ]

    plan = GroupPlan(
        children,
        lambda info: print("ready", {name: said["pid"] for name, said in info.items()}, flush=True),  # noqa: T201
        drain_s=0.5,
        drain_margin_s=1.0,
        first_backoff_s=0.1,
        hang_s=float(hang_s),
        max_failures=int(max_failures),
    )
    try:
        Supervisor(plan).run()
    except WorkerError as error:
        print(error, flush=True)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
