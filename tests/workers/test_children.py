"""Children of a supervisor: which count as hanging, which failure a group died of, and one that ends at once."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from minisgl_batch.child_process import ChildBeat, ChildFailed, ChildPlan, ChildProcess, ChildReady
from minisgl_batch.errors import InvalidParameterError, RankLostError
from minisgl_workers.children import Children, _Child
from tests.jobs.helpers import wait_for
from tests.workers.toy_child import ToyConfig


def test_a_rank_that_lost_another_one_is_not_the_cause() -> None:
    lost = RankLostError("another rank is gone")
    echo = ChildFailed(str(lost), True, lost.exit_code, at_s=1.0)
    killed = ChildFailed("rank 1 was killed by SIGKILL", False, 1, at_s=1.2)
    children = Children([], first_backoff_s=1.0, hang_s=1.0)
    children._fail([echo, killed])
    assert children.failure == killed
    children._fail([echo])
    assert children.failure == echo


def hanging(children: Children, **heard_s: tuple[float, float]) -> list[str]:
    """What is said of processes that last beat, and last got on, so many seconds ago."""
    now = time.monotonic()
    for name, (beat_s, progress_s) in heard_s.items():
        plan = ChildPlan(name, "", ToyConfig(name, "", ""))
        children._children.append(_Child(plan, None, now, got_on=now - progress_s, heard=now - beat_s))
    failures: list[ChildFailed] = []
    children._find_hanging(failures)
    return [failure.message for failure in failures]


def test_a_stopped_rank_is_named_and_not_one_that_waits_for_it() -> None:
    children = Children([], first_backoff_s=1.0, hang_s=8.0)
    assert hanging(children, waiting=(0.0, 7.0), stopped=(6.9, 6.9)) == ["stopped hangs: silent for 4 s"]


def test_a_pause_of_this_process_counts_for_nobody() -> None:
    children = Children([], first_backoff_s=1.0, hang_s=8.0)
    children._looked -= 1000
    assert hanging(children, slept=(1000.0, 1000.0), woken=(0.0, 0.0)) == []
    assert all(child.heard <= time.monotonic() >= (child.got_on or 0) for child in children._children)


def test_a_child_that_is_ready_has_beaten(tmp_path: Path) -> None:
    child = ChildPlan("rank", "tests.workers.toy_child", ToyConfig("rank", str(tmp_path), "")).start()
    assert isinstance(child.read_status(), ChildBeat)
    assert isinstance(child.read_status(), ChildReady)
    child.stop(0.0)


def test_the_spare_child_of_a_group_that_is_refused_ends_in_order(tmp_path: Path) -> None:
    """RQ lists a worker that was killed for minutes."""
    (tmp_path / "frontend.do").write_text("never ready\n")
    plans = [
        ChildPlan(
            name, "tests.workers.toy_child", ToyConfig(name, str(tmp_path), str(tmp_path)), is_spare=name == "tasks"
        )
        for name in ("frontend", "tasks")
    ]
    children = Children(plans, first_backoff_s=1.0, hang_s=60.0)
    woken, wake = os.pipe()
    children.start(woken)
    wait_for("the spare child", (tmp_path / "tasks.pid").exists)
    while children.failure is None:
        children.wait()
    children.stop(0.0)
    assert (tmp_path / "ended").exists()
    os.close(woken)
    os.close(wake)


def test_errors_of_options_keep_their_names() -> None:
    failure = ChildFailed(str(InvalidParameterError("max_seq_len", "is too much")), True, 2, field="max_seq_len")
    error = failure.error()
    assert isinstance(error, InvalidParameterError)
    assert (error.field, error.reason) == ("max_seq_len", "is too much")
    assert ChildFailed("it died", False, 7).error().exit_code == 7


def test_a_child_that_ends_before_it_got_its_configuration_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def start_and_end(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*args, **options)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_end)
    child = ChildProcess("rank", "no.such.module", ToyConfig("rank", "", ""))
    assert child.read_status() is None
    assert child.describe_end() == "ended with exit code 1"
    child.stop(0.0)
