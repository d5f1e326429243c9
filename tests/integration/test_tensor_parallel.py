"""A worker group of several ranks, with a job running while ranks die: the dataset is complete all the same."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.model import JobState
from tests.integration.conftest import Start, make_client, make_command
from tests.jobs.helpers import wait_for
from tests.processes import Command

NUM_ROWS = 24
RANKS = {0: "minisgl_workers.rank", 1: "minisgl_batch.scheduler.follower"}
AGAIN_S = 60.0


@pytest.fixture(scope="module")
def pair(home: Path) -> Iterator[Command]:
    """A worker group of two ranks that notices a hang within seconds."""
    options = ("--model", "demo", "--tp", 2, "--num-pages", 1024, "--max-running", 8)
    with make_command(home, "worker", *options, "--hang-s", 8, "--lease-s", 1) as command:
        command.wait_for("serving jobs for demo")
        yield command


@pytest.fixture
def api(home: Path, pair: Command) -> Iterator[Client]:
    pair.wait_for("serving")  # it has started the Redis
    with make_client(home) as made:
        yield made


def rank_pids(worker: Command) -> dict[int, int]:
    """Process ids by rank, as far as they have started."""
    children = psutil.Process(worker.pid).children(recursive=True)
    lines = {child.pid: child.cmdline() for child in children}
    return {rank: pid for rank, module in RANKS.items() for pid, line in lines.items() if module in line}


@pytest.mark.parametrize(
    ("rank", "attack", "said"),
    [
        (0, signal.SIGKILL, "rank 0 was killed by SIGKILL; starting the group again"),
        (1, signal.SIGKILL, "rank 1 was killed by SIGKILL; starting the group again"),
        (1, signal.SIGSTOP, "rank 1 hangs: silent for 4 s; starting the group again"),
    ],
    ids=["rank 0 dies", "rank 1 dies", "rank 1 hangs"],
)
def test_a_rank_dies_or_hangs_and_the_dataset_is_complete(
    rank: int, attack: signal.Signals, said: str, pair: Command, api: Client, tmp_path: Path
) -> None:
    lengths = [random.randint(8, 32) for _ in range(NUM_ROWS)]
    rows = [{"prompt": f"{i} + 1 =", "max_tokens": length} for i, length in enumerate(lengths)]
    pid, moment = rank_pids(pair)[rank], random.randint(1, NUM_ROWS // 2)
    job = api.submit(rows, model="demo", output=tmp_path / "out", chunk_rows=4, ignore_eos=True)
    wait_for("a random moment", lambda: num_ended(job) >= moment, AGAIN_S)
    os.kill(pid, attack)
    assert not job.status().state.is_final, "the job was over before the attack"
    pair.wait_for(said)
    assert job.wait(AGAIN_S).state is JobState.FINISHED
    table = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert set(table["status"].to_pylist()) == {"ok"}
    assert table["completion_tokens"].to_pylist() == lengths


def num_ended(job: JobHandle) -> int:
    """Rows that no death takes away."""
    status = job.status()
    return status.rows_done + status.num_spooled


def test_no_rank_survives_its_supervisor(pair: Command) -> None:
    """The last one with this group."""
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
