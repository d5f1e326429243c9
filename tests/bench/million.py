"""A job of a million short rows: what its submit costs, and whether memory stays flat while it runs.

python -m tests.bench million. Prints one JSON line a case: rows through Redis, rows left where they are (JSON lines,
gzip and Parquet). The engine costs nothing, so what is seen is everything around it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_batch.errors import JobStateError
from minisgl_jobs.row_texts import RowText
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.bench.records import record
from tests.jobs.helpers import wait_for
from tests.processes import environment
from tests.workers.echo_group import MODEL, start_echo_group
from tests.workers.echo_rank import EchoConfig

READY_S = 60.0
NUM_TOKENS = 8
SAMPLE_S = 1.0
WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "knoll", "larch", "marsh")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench million", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--run-s", type=float, default=60.0, help="how long each job is watched")
    parser.add_argument("--save", action="store_true", help="append to tests/bench/results/million.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, write, transport in CASES:
            source = write(folder, options.rows)
            measured = measure(source, folder / "out" / case, options.rows, transport, options.run_s)
            source.unlink()
            record("million", {"case": case, "rows": options.rows, **measured}, save=options.save)


def prompts(num_rows: int) -> Iterator[str]:
    """Short ones, no two alike."""
    rng = random.Random(7)
    for index in range(num_rows):
        yield f"Row {index}: what comes after {' '.join(rng.choices(WORDS, k=6))}?"


def write_json_lines(folder: Path, num_rows: int, opened: Callable[..., Any] = open, name: str = "rows.jsonl") -> Path:
    with opened(folder / name, "wt") as file:
        file.writelines(
            json.dumps({"custom_id": f"r{i}", "prompt": text}) + "\n" for i, text in enumerate(prompts(num_rows))
        )
    return folder / name


def write_gzip(folder: Path, num_rows: int) -> Path:
    return write_json_lines(folder, num_rows, gzip.open, "rows.jsonl.gz")


def write_parquet(folder: Path, num_rows: int) -> Path:
    table = pa.table({"custom_id": [f"r{i}" for i in range(num_rows)], "prompt": list(prompts(num_rows))})
    pq.write_table(table, folder / "rows.parquet", row_group_size=100_000)
    return folder / "rows.parquet"


CASES = [
    ("by value", write_json_lines, "--by-value"),
    ("by reference", write_json_lines, "--by-reference"),
    ("by reference, gzip", write_gzip, "--by-reference"),
    ("by reference, Parquet", write_parquet, "--by-reference"),
]


def measure(source: Path, output: Path, num_rows: int, transport: str, run_s: float) -> dict[str, Any]:
    """Submit while the queue is paused, then let it run and watch."""
    with (
        EmbeddedRedis.private() as server,
        Client(server.url) as client,
        start_echo_group(server.url, engine=EchoConfig()) as group,
    ):
        group.wait_for("serving", READY_S)
        store = redis.Redis.from_url(server.url)
        client.pause(MODEL)
        empty = used_memory(store)
        found = submit(server.url, source, output, transport)
        (status,) = client.jobs()
        assert status.spec.num_rows == num_rows
        found["input_mb"] = mb(source.stat().st_size)
        found["payload_mb"] = mb(sum(store.hstrlen(*field) for field in payloads(store, status.job_id)))
        found["redis_mb"] = mb(used_memory(store) - empty)
        released = time.monotonic()
        client.resume(MODEL)
        job = client.job(status.job_id)
        first_token(job)
        found["first_token_s"] = round(time.monotonic() - released, 2)
        found |= watch(job, client, store, run_s)
        started = time.monotonic()
        small = client.submit([f"small {i}" for i in range(10)], model=MODEL, output=f"{output}-small", max_tokens=8)
        first_token(small)
        found["first_token_of_a_small_job_s"] = round(time.monotonic() - started, 2)
        with suppress(JobStateError):  # a job of few rows has ended
            job.cancel()
        wait_for("the end of the jobs", lambda: all(j.status().state.is_final for j in (job, small)), 120)
        store.close()
    return found


def submit(url: str, source: Path, output: Path, transport: str) -> dict[str, Any]:
    """The command line's, in a process of its own."""
    options = ["--model", MODEL, "--redis", url, "-o", str(output), "--max-tokens", str(NUM_TOKENS), "--ignore-eos"]
    command = [sys.executable, "-m", "minisgl_batch.cli.main", "submit", str(source), transport, *options]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment())
    peak_mb = 0.0
    while process.poll() is None:
        # Not what `wait4` tells: that begins with this process's own, which has just written the input.
        peak_mb = max(peak_mb, memory_mb(process.pid, "VmHWM"))
        time.sleep(0.02)
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read().decode()
    process.stderr.close()
    return {"submit_s": round(time.monotonic() - started, 2), "client_rss_mb": round(peak_mb)}


def first_token(job: JobHandle) -> None:
    """Wait for it, as a reader that is there from the start."""
    for event in job.stream():
        if isinstance(event, RowText):
            return


def watch(job: JobHandle, client: Client, store: redis.Redis, run_s: float) -> dict[str, Any]:
    """Memory of the frontend and of Redis while rows are done, in the first and the last third of the time."""
    (worker,) = client.workers()
    samples: list[tuple[float, float]] = []
    started, rows_before = time.monotonic(), job.status().rows_done
    while (elapsed := time.monotonic() - started) < run_s and not job.status().state.is_final:
        samples.append((memory_mb(worker.pid, "VmRSS"), mb(used_memory(store))))
        time.sleep(SAMPLE_S)
    third = max(1, len(samples) // 3)
    names = ("frontend_rss_mb", "redis_mb_running")
    found = {
        name: [round(max(column[:third])), round(max(column[-third:]))]
        for name, column in zip(names, zip(*samples, strict=True), strict=True)
    }
    return {**found, "rows_per_s": round((job.status().rows_done - rows_before) / elapsed)}


def payloads(store: redis.Redis, job_id: str) -> Iterator[tuple[bytes, bytes]]:
    """The hash and field of each payload."""
    for key in store.scan_iter(match=f"*job:{job_id}:in"):
        for field in store.hkeys(key):
            yield key, field


def used_memory(store: redis.Redis) -> int:
    return int(store.info("memory")["used_memory"])


def memory_mb(pid: int, what: str) -> float:
    """Resident memory of a process, now (VmRSS) or at most (VmHWM); 0 when it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(what)), 0.0)


def mb(num_bytes: int) -> float:
    return round(num_bytes / 1e6, 1)


if __name__ == "__main__":
    main()
