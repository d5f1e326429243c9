"""Several worker groups on one host: they share a queue, and the end of one leaves the others alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest

from tests.integration.conftest import Start, make_client, make_command
from tests.jobs.helpers import wait_for
from tests.processes import Command

NUM_ROWS = 120
SOON_S = 60.0
ENGINE = ("--model", "demo", "--device", "cpu", "--num-pages", 1024)


@pytest.fixture
def groups(home: Path) -> Iterator[Command]:
    """Two groups of one rank."""
    options = (*ENGINE, "--max-running", 4, "--groups", 2, "--lease-s", 4)
    with make_command(home, "worker", *options) as command:
        command.wait_for("group 0: serving jobs for demo")
        command.wait_for("group 1: serving jobs for demo")
        yield command


def supervisors(worker: Command) -> list[psutil.Process]:
    """Of the groups, in the order of their start."""
    children = psutil.Process(worker.pid).children()
    return [child for child in children if "minisgl_workers.group_process" in child.cmdline()]


def submit(home: Path, output: Path) -> None:
    """A job that keeps both groups busy for some seconds."""
    rows = [f"{i} + 1 =" for i in range(NUM_ROWS)]
    with make_client(home) as client:
        client.submit(rows, model="demo", output=output, max_tokens=60, ignore_eos=True, chunk_rows=6)


def check(output: Path) -> None:
    wait_for("the dataset", (output / "_SUCCESS").exists, 120)
    table = ds.dataset(output, format="parquet").to_table()
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert set(table["completion_tokens"].to_pylist()) == {60}


def test_a_group_dies_another_goes_on_and_a_signal_drains_all(groups: Command, home: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    submit(home, output)
    wait_for("the first parts", lambda: list(output.glob("part-*.parquet")), SOON_S)
    first, second = supervisors(groups)
    processes = [first, *first.children(recursive=True)]
    first.kill()
    wait_for("the end of its processes", lambda: not any(process.is_running() for process in processes[1:]), SOON_S)
    groups.wait_for("group 0 was killed by SIGKILL; starting it again in 1 s")
    wait_for("its return", lambda: groups.stderr.count("group 0: serving") == 2, SOON_S)
    assert second.is_running()
    assert groups.stderr.count("group 1: serving") == 1

    processes = [child for group in supervisors(groups) for child in [group, *group.children(recursive=True)]]
    groups.signal(signal.SIGINT)
    (home / "other").mkdir()
    with make_command(home, "worker", *ENGINE, TMPDIR=str(home / "other")) as other:
        groups.finish(timeout_s=90)
        assert groups.stderr.count("a second signal stops at once") == 2
        assert not any(process.is_running() for process in processes)
        assert os.listdir(home / "tmp") == []
        check(output)
        other.signal(signal.SIGINT)
        other.finish()


def test_an_option_that_can_not_be_used_is_said_once(start: Start) -> None:
    with start("worker", "--model", "demo", "--groups", 2, "--device", "cpu", "--tp", 3) as refused:
        refused.finish(code=2)
    assert refused.stderr.count("tp: 3 ranks can't share 8 query heads") == 1
    assert "Traceback" not in refused.stderr
