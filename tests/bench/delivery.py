"""Rows a second from Redis to Parquet, with an engine that costs nothing: python -m tests.bench delivery.

Prints one JSON line a case: without a reader, and with one that streams all tokens. Besides the rate there is the
processor time of a row in each process, which doesn't depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import psutil

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.row_texts import RowFinished, RowText
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.bench.records import record
from tests.jobs.helpers import wait_for
from tests.workers.echo_group import MODEL, start_echo_group
from tests.workers.echo_rank import EchoConfig

READY_S = 60.0
NUM_TOKENS = 32
MODULES = {"frontend": "minisgl_workers.frontend", "engine": "tests.workers.echo_rank"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench delivery", description=__doc__)
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--save", action="store_true", help="append to tests/bench/results/delivery.jsonl")
    options = parser.parse_args()
    with EmbeddedRedis.private() as server, tempfile.TemporaryDirectory() as folder:
        engine = EchoConfig(max_running=options.max_running)
        with start_echo_group(server.url, engine=engine) as group, Client(server.url) as client:
            group.wait_for("serving", READY_S)
            for case, readers in (("no reader", 0), ("one streaming reader", 1)):
                before = processor_s(group.pid)
                measured = measure(client, Path(folder) / case, options.rows, readers)
                for name, seconds in processor_s(group.pid).items():
                    measured[f"{name}_us_per_row"] = round((seconds - before[name]) / options.rows * 1e6)
                record("delivery", {"case": case, "rows": options.rows, **measured}, save=options.save)


def processor_s(pid: int) -> dict[str, float]:
    """Processor time so far of a group's processes, and of this one with its client and readers."""
    found = {"client": time.process_time()}
    for process in psutil.Process(pid).children():
        for name, module in MODULES.items():
            if module in process.cmdline():
                times = process.cpu_times()
                found[name] = times.user + times.system
    return found


def measure(client: Client, output: Path, num_rows: int, num_readers: int) -> dict[str, float | int]:
    """Run a job of short rows; the clock runs from when it is queued to its `_SUCCESS`."""
    prompts = [f"row {index} of the bench" for index in range(num_rows)]
    job = client.submit(prompts, model=MODEL, output=output, max_tokens=NUM_TOKENS, ignore_eos=True)
    started = time.monotonic()
    counts: list[tuple[int, int]] = []
    readers = [threading.Thread(target=lambda: counts.append(read(job))) for _ in range(num_readers)]
    for reader in readers:
        reader.start()
    wait_for("the end of the job", lambda: job.status().state.is_final, 600)
    wall_s = time.monotonic() - started
    for reader in readers:
        reader.join(60)
    table = job.results()
    assert table.num_rows == num_rows, f"{table.num_rows} rows"
    assert all(rows == num_rows for rows, _ in counts), counts
    return {"wall_s": round(wall_s, 2), "rows_per_s": round(num_rows / wall_s)}


def read(job: JobHandle) -> tuple[int, int]:
    """Rows and characters that a streaming reader sees."""
    num_rows = num_chars = 0
    for event in job.stream():
        match event:
            case RowText():
                num_chars += len(event.text)
            case RowFinished():
                num_rows += 1
    return num_rows, num_chars


if __name__ == "__main__":
    main()
