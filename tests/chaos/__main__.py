"""The long form of chaos: python -m tests.chaos. Prints a table, and with --save notes the figures.

Two worker groups with an engine that echoes serve one job, while every kind of process is killed or stopped at random
moments and Redis is killed and started again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.bench.records import record
from tests.chaos.attack import Attack, check
from tests.chaos.world import World

CHUNK_ROWS = 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--lease-s", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=8, help="of strikes of every kind at each group")
    parser.add_argument("--restarts", type=int, default=2, help="of Redis")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--save", action="store_true", help="append to tests/bench/results/chaos.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mb-") as folder:
        sizes = {"num_rows": options.chunks * CHUNK_ROWS, "chunk_rows": CHUNK_ROWS}
        with World(Path(folder), **sizes, lease_s=options.lease_s, step_s=0.025) as world:
            rng, counts = random.Random(options.seed), {"num_rounds": options.rounds, "num_restarts": options.restarts}
            summary = Attack(world, rng, **counts, pause_s=4.0, end_s=3000).run()
    strikes = {f"strikes: {kind}": number for kind, number in summary["strikes"].items()}
    for name, value in {**summary, **strikes}.items():
        if name != "strikes":
            print(f"{name.replace('_', ' '):32} {value}")
    record("chaos", {"seed": options.seed, **summary}, save=options.save, module="tests.chaos")
    check(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
