"""Whether readers see every token once: those that come late, read at 1 % of the speed, or are cut off 20 times.

    python -m tests.bench readers [--rows 128] [--save]

The engine echoes 32 tokens a row. Every reader's texts and ends are compared with the dataset; a difference fails.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from minisgl_batch.client import Client
from minisgl_jobs.connection import connect
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.bench.records import record
from tests.jobs.helpers import wait_for
from tests.workers.echo_group import MODEL, start_echo_group
from tests.workers.echo_rank import EchoConfig
from tests.workers.reading import Reader

READY_S = 60.0
END_S = 900.0
NUM_TOKENS = 32
MAX_RUNNING = 64
STEP_S = 0.02
SLOW_PAUSE_S = 100 * STEP_S / MAX_RUNNING  # for each event; the engine makes one for each row and step
NUM_CUTS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--save", action="store_true", help="append to tests/bench/results/readers.jsonl")
    options = parser.parse_args()
    with EmbeddedRedis.private() as server, tempfile.TemporaryDirectory() as folder:
        engine, output = EchoConfig(max_running=MAX_RUNNING, step_s=STEP_S), Path(folder) / "out"
        with start_echo_group(server.url, engine=engine) as group, Client(server.url) as client:
            group.wait_for("serving", READY_S)
            prompts = [f"row {index} of {options.rows}" for index in range(options.rows)]
            job = client.submit(prompts, model=MODEL, output=output, max_tokens=NUM_TOKENS, ignore_eos=True)
            readers = {"from the start": Reader(server.url, job.id), "slow": Reader(server.url, job.id, SLOW_PAUSE_S)}
            cutter = connect(server.url)
            for number in range(NUM_CUTS):
                time.sleep(random.uniform(0, 0.13))
                cutter.client_kill_filter(_type="pubsub")  # of all readers that are here
                if number % 5 == 0:
                    readers[f"late {number // 5}"] = Reader(server.url, job.id)
            wait_for("the end of the job", lambda: job.status().state.is_final, END_S)
            readers["after the end"] = Reader(server.url, job.id)
            for reader in readers.values():
                reader.check(output, END_S)
    events = {f"events: {name}": reader.num_events for name, reader in readers.items()}
    measured = {"rows": options.rows, "cuts": NUM_CUTS, "readers": len(readers), "texts_wrong": 0, "ends_wrong": 0}
    record("readers", {**measured, **events}, save=options.save)


if __name__ == "__main__":
    main()
