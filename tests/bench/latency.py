"""Time from submit to the first token, on the demo model and an idle group, job by job.

    python -m tests.bench latency [--jobs 200] [--save]

Each job has one row. The clock runs from the call of `Client.submit` to the first text that `JobHandle.stream` gives.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from minisgl_batch.client import Client
from minisgl_jobs.row_texts import RowText
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.bench.records import record
from tests.processes import Command

READY_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="append to tests/bench/results/latency.jsonl")
    options = parser.parse_args()
    with EmbeddedRedis.private() as server, tempfile.TemporaryDirectory() as folder:
        arguments = ("worker", "--model", "demo", "--redis", server.url, "--num-pages", 4096)
        with Command(*arguments) as worker, Client(server.url) as client:
            worker.wait_for("serving", READY_S)
            for number in range(5):
                first_token_ms(client, Path(folder) / f"warm-{number}")
            times = sorted(first_token_ms(client, Path(folder) / str(number)) for number in range(options.jobs))
    measured = {name: round(times[int(share * (len(times) - 1))], 1) for name, share in SHARES.items()}
    record("latency", {"jobs": options.jobs, **measured}, save=options.save)


SHARES = {"min_ms": 0.0, "p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "max_ms": 1.0}


def first_token_ms(client: Client, output: Path) -> float:
    """Submit a job of one row and read its tokens to the end; the time of the first."""
    prompt = f"{random.randrange(1000)} + {random.randrange(1000)} ="
    started = time.perf_counter()
    job = client.submit([{"messages": [{"role": "user", "content": prompt}]}], model="demo", output=output)
    first = None
    for event in job.stream():
        if first is None and isinstance(event, RowText):
            first = time.perf_counter()
    assert first is not None, "no token came"
    return (first - started) * 1000


if __name__ == "__main__":
    main()
