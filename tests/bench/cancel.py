"""How fast a cancel is: the demo model runs 64 long rows, and a reader streams them: python -m tests.bench cancel.

Prints one JSON line, in milliseconds from the call: when the reader has seen it, when the last token has come to the
reader, when the job has its last state; and how long an engine step takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.model import JobState
from minisgl_jobs.reader import JobChanged
from minisgl_jobs.row_texts import RowText
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.bench.records import record
from tests.jobs.helpers import wait_for
from tests.processes import Command

NUM_ROWS = 64
AFTER = (JobState.CANCELING, JobState.FINALISING, JobState.CANCELED)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench cancel", description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="append to tests/bench/results/cancel.jsonl")
    options = parser.parse_args()
    with (
        EmbeddedRedis.private() as server,
        tempfile.TemporaryDirectory() as folder,
        Command("worker", "--model", "demo", "--redis", server.url) as worker,
        Client(server.url) as client,
    ):
        worker.wait_for("serving", 120)
        runs = [measure(client, Path(folder) / str(number)) for number in range(options.times)]
    names = ("seen_ms", "last_token_ms", "ended_ms", "step_ms")
    found = {name: [run[index] for run in runs] for index, name in enumerate(names)}
    summary = {
        f"{name}_{how}": round(value, 2)
        for name, values in found.items()
        for how, value in (("p50", statistics.median(values)), ("max", max(values)))
    }
    record("cancel", {"rows": NUM_ROWS, "times": options.times, **summary}, save=options.save)


def measure(client: Client, output: Path) -> tuple[float, float, float, float]:
    """One cancel, at a random moment."""
    prompts = [f"{index} + {index} =" for index in range(NUM_ROWS)]
    job = client.submit(prompts, model="demo", output=output, max_tokens=1900, ignore_eos=True)
    log: list[tuple[float, JobState | int]] = []
    reader = threading.Thread(target=lambda: follow(job, log))
    reader.start()
    wait_for("all rows to run", lambda: len({what for _, what in log if isinstance(what, int)}) == NUM_ROWS, 60)
    enough = len(log) + random.randrange(20, 60) * NUM_ROWS
    wait_for("a random moment", lambda: len(log) > enough, 60)
    called = time.monotonic()
    job.cancel()
    reader.join(60)
    states = {what: at for at, what in log if isinstance(what, JobState)}
    last = max(at for at, what in log if isinstance(what, int))
    step_s = steps_apart([at for at, what in log if what == 0])
    return (
        (min(at for state, at in states.items() if state in AFTER) - called) * 1000,
        (last - called) * 1000,
        (states[JobState.CANCELED] - called) * 1000,
        step_s * 1000,
    )


def follow(job: JobHandle, log: list[tuple[float, JobState | int]]) -> None:
    """Note when which row got text, and the job another state."""
    for event in job.stream():
        if isinstance(event, JobChanged):
            log.append((time.monotonic(), event.state))
        elif isinstance(event, RowText):
            log.append((time.monotonic(), event.row_index))


def steps_apart(times: list[float]) -> float:
    """Seconds between the messages of one row, each of one or a few engine steps."""
    return statistics.median(later - earlier for earlier, later in pairwise(times))


if __name__ == "__main__":
    main()
