"""A worker group of several ranks, with a job running while ranks die: the dataset is complete all the same."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest

from tests.integration.conftest import Start, make_command
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import write_rows
from tests.processes import Command

NUM_ROWS = 160
RANKS = {0: "minisgl_workers.rank", 1: "minisgl_batch.scheduler.follower"}
AGAIN_S = 60.0


@pytest.fixture
def pair(home: Path) -> Iterator[Command]:
    """A worker group of two ranks that notices a hang within seconds."""
    options = ("--model", "demo", "--tp", 2, "--num-pages", 1024, "--max-running", 8)
    with make_command(home, "worker", *options, "--hang-s", 5, "--lease-s", 4) as command:
        command.wait_for("serving jobs for demo")
        yield command


def rank_pids(worker: Command) -> dict[int, int]:
    """Process ids by rank, as far as they have started."""
    children = psutil.Process(worker.pid).children(recursive=True)
    lines = {child.pid: child.cmdline() for child in children}
    return {rank: pid for rank, module in RANKS.items() for pid, line in lines.items() if module in line}


def test_ranks_die_and_hang_and_the_dataset_is_complete(pair: Command, start: Start, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} + 1 ="} for i in range(NUM_ROWS)])
    options = ("--max-tokens", 40, "--ignore-eos", "--chunk-rows", 20, "--seed", 1)
    with start("submit", source, "--model", "demo", "--output", tmp_path / "out", *options) as submitting:
        job_id = submitting.finish().stdout.strip()
    attacks = [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
    random.shuffle(attacks)
    for number, (rank, attack) in enumerate(attacks):
        started = time.monotonic()
        pause_s = random.uniform(0.1, 0.5)
        wait_for("a random moment", lambda: time.monotonic() - started > pause_s)  # noqa: B023 - called at once
        assert not (tmp_path / "out" / "_SUCCESS").exists(), "the job was over before the attack"
        os.kill(rank_pids(pair)[rank], attack)
        wait_for("the group's end", lambda: pair.stderr.count("starting the group again") > number, AGAIN_S)  # noqa: B023
        wait_for("the group's return", lambda: pair.stderr.count("serving") > number + 1, AGAIN_S)  # noqa: B023
    assert "rank 1 hangs" in pair.stderr
    assert "rank 0 was killed by SIGKILL" in pair.stderr
    assert "rank 1 was killed by SIGKILL" in pair.stderr
    wait_for("the dataset", (tmp_path / "out" / "_SUCCESS").exists, 120)
    table = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert set(table["status"].to_pylist()) == {"ok"}
    assert set(table["completion_tokens"].to_pylist()) == {40}
    with start("status", job_id, "--json") as status:
        assert json.loads(status.finish().stdout)["state"] == "finished"


def test_no_rank_survives_its_supervisor(pair: Command) -> None:
    pids = rank_pids(pair)
    assert set(pids) == {0, 1}
    os.kill(pids[1], signal.SIGSTOP)  # so that it can't do anything for it
    pair.signal(signal.SIGKILL)
    wait_for("the end of all ranks", lambda: not any(map(psutil.pid_exists, pids.values())), 20)


def test_a_size_that_does_not_fit_is_said_before_anything_starts(start: Start) -> None:
    with start("worker", "--model", "demo", "--tp", 3) as refused:
        refused.finish(code=2)
    assert "tp: 3 ranks can't share 8 query heads" in refused.stderr
    assert "Traceback" not in refused.stderr
