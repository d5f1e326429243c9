"""Several worker groups on one host: they share a queue, and the end of one leaves the others alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest

from tests.integration.conftest import Start, make_command
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.cli.conftest import write_rows
from tests.processes import Command

NUM_ROWS = 120
SOON_S = 60.0


@pytest.fixture
def groups(home: Path) -> Iterator[Command]:
    """Two groups of one rank."""
    options = ("--model", "demo", "--groups", 2, "--num-pages", 1024, "--max-running", 4, "--lease-s", 4)
    with make_command(home, "worker", *options) as command:
        command.wait_for("group 0: serving jobs for demo")
        command.wait_for("group 1: serving jobs for demo")
        yield command


def supervisors(worker: Command) -> list[psutil.Process]:
    """Of the groups, in the order of their start."""
    children = psutil.Process(worker.pid).children()
    return [child for child in children if "minisgl_workers.group_process" in child.cmdline()]


def submit(start: Start, folder: Path) -> Path:
    """A job that keeps both groups busy for some seconds; its output's folder."""
    source = write_rows(folder / "rows.jsonl", [{"prompt": f"{i} + 1 ="} for i in range(NUM_ROWS)])
    options = ("--max-tokens", 60, "--ignore-eos", "--chunk-rows", 6, "--output", folder / "out")
    with start("submit", source, "--model", "demo", *options) as submitting:
        submitting.finish()
    return folder / "out"


def check(output: Path) -> None:
    wait_for("the dataset", (output / "_SUCCESS").exists, 120)
    table = ds.dataset(output, format="parquet").to_table()
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert set(table["completion_tokens"].to_pylist()) == {60}


def test_a_group_dies_another_goes_on_and_a_signal_drains_all(
    groups: Command, start: Start, home: Path, tmp_path: Path
) -> None:
    output = submit(start, tmp_path)
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
    groups.finish(timeout_s=90)
    assert groups.stderr.count("a second signal stops at once") == 2
    assert not any(process.is_running() for process in processes)
    assert os.listdir(home / "tmp") == []
    with make_command(home, "worker", "--model", "demo", "--num-pages", 1024) as other:
        check(output)
        other.signal(signal.SIGINT)
        other.finish()


def test_an_option_that_can_not_be_used_is_said_once(start: Start) -> None:
    with start("worker", "--model", "demo", "--groups", 2, "--max-seq-len", 10**6) as refused:
        refused.finish(code=2)
    assert "max_seq_len" in refused.stderr.replace("-", "_")
    assert "Traceback" not in refused.stderr
