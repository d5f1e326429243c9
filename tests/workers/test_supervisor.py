"""A supervisor whose processes die, hang or are told to stop: what is started again, and what ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs.helpers import wait_for
from tests.processes import Command

SOON_S = 20.0


class Group:
    """A toy group that runs in a folder."""

    def __init__(self, folder: Path, *, hang_s: float = 60.0, max_failures: int = 8) -> None:
        self.folder = folder
        self.pids: dict[str, int] = {}
        (folder / "tmp").mkdir()
        self.command = Command(
            *(folder, hang_s, max_failures), module="tests.workers.toy_group", TMPDIR=str(folder / "tmp")
        )

    def wait_ready(self, num_starts: int = 1) -> None:
        """Wait until the group's processes are ready for the so manieth time."""
        wait_for("a group that is ready", lambda: self.command.stdout.count("ready") >= num_starts, SOON_S)
        self.pids = {name: self.pid(name) for name in ("frontend", "rank", "tasks")}

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def tell(self, name: str, order: str) -> None:
        (self.folder / f"{name}.do").write_text(f"{order}\n")

    def is_gone(self) -> bool:
        """Whether none of the processes lives that `wait_ready` found, and no directory is left."""
        return not any(map(lives, self.pids.values())) and not os.listdir(self.folder / "tmp")


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    toy = Group(tmp_path)
    with toy.command:
        toy.wait_ready()
        yield toy


@pytest.mark.parametrize("name", ["frontend", "rank"])
def test_the_death_of_frontend_or_rank_starts_the_group_again(group: Group, name: str) -> None:
    before = dict(group.pids)
    os.kill(group.pids[name], signal.SIGKILL)
    group.command.wait_for(f"{name} was killed by SIGKILL; starting the group again in 0.1 s")
    wait_for("the end of the others", lambda: not any(map(lives, before.values())), SOON_S)
    group.wait_ready(2)
    assert not set(before.values()) & set(group.pids.values())
    group.command.signal(signal.SIGTERM)
    group.command.finish()
    assert group.is_gone()


def test_the_death_of_the_task_runner_leaves_the_others_alone(group: Group) -> None:
    before = dict(group.pids)
    os.kill(group.pids["tasks"], signal.SIGKILL)
    group.command.wait_for("tasks was killed by SIGKILL; starting it again in 0.1 s")
    wait_for("another task runner", lambda: group.pid("tasks") != before["tasks"], SOON_S)
    group.tell("tasks", "exit")
    group.command.wait_for("tasks ended with exit code 3; starting it again in 0.2 s")
    assert lives(before["frontend"])
    assert lives(before["rank"])
    assert group.command.stdout.count("ready") == 1


def test_the_first_error_is_the_one_that_is_reported(group: Group) -> None:
    os.kill(group.pids["frontend"], signal.SIGSTOP)  # so that it dies last
    group.tell("rank", "raise")
    group.command.wait_for("ValueError: broken; starting the group again")
    assert "in main\n    raise ValueError" in group.command.stderr  # a defect: with its traceback


def test_a_group_that_can_not_start_says_why_and_ends(tmp_path: Path) -> None:
    (tmp_path / "rank.do").write_text("never ready\n")
    toy = Group(tmp_path)
    with toy.command:
        toy.command.finish(code=2)
    assert toy.command.stdout == "there is no such thing\n"
    assert "Traceback" not in toy.command.stderr
    assert os.listdir(tmp_path / "tmp") == []


def test_a_group_that_dies_too_often_ends(tmp_path: Path) -> None:
    toy = Group(tmp_path, max_failures=1)
    with toy.command:
        for num_starts in (1, 2):
            toy.wait_ready(num_starts)
            os.kill(toy.pids["rank"], signal.SIGKILL)
        toy.command.finish(code=1)
    assert toy.command.stdout.endswith("rank was killed by SIGKILL\n")


@pytest.mark.parametrize(("order", "max_failures"), [("suspect", 0), ("deliver", 1)])
def test_deaths_over_suspect_rows_or_after_some_work_do_not_add_up(
    tmp_path: Path, order: str, max_failures: int
) -> None:
    toy = Group(tmp_path, max_failures=max_failures)
    with toy.command:
        for num_starts in (1, 2):
            toy.wait_ready(num_starts)
            toy.tell("frontend", order)
            wait_for("the order's execution", lambda: not (tmp_path / "frontend.do").exists())
            toy.tell("rank", "exit")
        toy.wait_ready(3)


def test_a_rank_that_hangs_takes_the_group_down(tmp_path: Path) -> None:
    toy = Group(tmp_path, hang_s=2)
    with toy.command:
        toy.wait_ready()
        toy.tell("rank", "hang")
        toy.command.wait_for("rank hangs: nothing for 2 s; starting the group again")
        wait_for("its end", lambda: not lives(toy.pids["rank"]), SOON_S)
        toy.wait_ready(2)


def test_a_stopped_rank_counts_as_hanging_but_an_idle_one_and_a_pause_of_all_do_not(tmp_path: Path) -> None:
    toy = Group(tmp_path, hang_s=4)
    with toy.command:
        toy.wait_ready()
        toy.tell("rank", "idle")
        wait_for("the order's execution", lambda: not (tmp_path / "rank.do").exists())
        family = [toy.command.pid, *toy.pids.values()]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        stopped = psutil.Process(toy.command.pid)
        wait_for("a stopped supervisor", lambda: stopped.status() == psutil.STATUS_STOPPED)
        started = time.monotonic()
        wait_for("more than a hang's time", lambda: time.monotonic() - started > 4.5)
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        before = dict(toy.pids)
        os.kill(toy.pids["rank"], signal.SIGSTOP)
        toy.command.wait_for("rank hangs: silent for 3 s")
        assert toy.command.stderr.count("hangs") == 1
        wait_for("its end", lambda: not lives(before["rank"]), SOON_S)


def test_the_first_signal_drains(group: Group) -> None:
    group.command.signal(signal.SIGINT)
    group.command.finish()
    assert (group.folder / "drained").exists()
    assert "a second signal stops at once" in group.command.stderr
    assert group.is_gone()


def test_a_rank_may_end_before_the_frontend_that_told_it_to(group: Group) -> None:
    (group.folder / "stubborn").touch()
    group.command.signal(signal.SIGTERM)
    wait_for("the drain", (group.folder / "drained").exists, SOON_S)
    group.tell("rank", "leave")
    wait_for("the end of the rank", lambda: not lives(group.pids["rank"]), SOON_S)
    group.tell("frontend", "leave")
    group.command.finish()
    assert "while it was stopping" not in group.command.stderr
    assert group.is_gone()


def test_the_second_signal_stops_at_once(group: Group) -> None:
    (group.folder / "stubborn").touch()
    group.command.signal(signal.SIGTERM)
    wait_for("the drain", (group.folder / "drained").exists)
    group.command.signal(signal.SIGTERM)
    group.command.finish(timeout_s=10)
    assert group.is_gone()


def test_a_drain_that_takes_too_long_is_ended(group: Group) -> None:
    (group.folder / "stubborn").touch()
    group.command.signal(signal.SIGTERM)
    group.command.wait_for("did not come to an end", SOON_S)
    group.command.finish()
    assert group.is_gone()


def test_a_death_while_draining_ends_it(group: Group) -> None:
    (group.folder / "stubborn").touch()
    group.command.signal(signal.SIGTERM)
    wait_for("the drain", (group.folder / "drained").exists)
    os.kill(group.pids["rank"], signal.SIGKILL)
    group.command.finish()
    assert "rank was killed by SIGKILL while it was stopping" in group.command.stderr
    assert group.is_gone()


def test_nothing_outlives_a_killed_supervisor(group: Group) -> None:
    os.kill(group.pids["rank"], signal.SIGSTOP)  # this one could not even notice
    group.command.signal(signal.SIGKILL)
    wait_for("the end of all", lambda: not any(map(lives, group.pids.values())), SOON_S)
