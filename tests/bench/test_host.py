"""The bench of a host of several GPUs: in its form for CPUs, and what it does with steps that go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.bench import host
from tests.bench.host import Step
from tests.jobs.helpers import wait_for

# Each says its findings on standard output, as a step does.
STEPS = {
    "good": "print('{\"passed\": true}')",
    "wrong": "print('{\"passed\": false}'); raise SystemExit(1)",
    "silent": "",
    "slow": "import time; print('a library talks'); print('{\"half\": 1}', flush=True); time.sleep(60)",
    "parent": (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print('{\"pid\": %d}' % child.pid, flush=True); time.sleep(1)"
    ),
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that steps run; what they leave behind has no time to end."""
    for name, program in STEPS.items():
        (tmp_path / f"step_{name}.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(host, "LEFT_S", 0.0)


def step(name: str, **options: float) -> Step:
    return Step(name, (f"step_{name}",), **{"limit_s": 30.0, **options})


@pytest.mark.usefixtures("modules")
def test_a_step_that_goes_wrong_stops_no_other(tmp_path: Path) -> None:
    with (tmp_path / "found.jsonl").open("w") as file:
        steps = [step("wrong"), step("silent"), step("slow", limit_s=2), step("good")]
        outcomes = host.run_all(steps, 60, file)
    assert [outcome.verdict for outcome in outcomes] == ["FAILED", "FAILED", "FAILED", "ok"]
    details = ["exit code 1", "it found nothing", "it took longer than 2 s", ""]
    assert [outcome.detail for outcome in outcomes] == details
    lines = (tmp_path / "found.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"passed": False}, {"half": 1}, {"passed": True}]


@pytest.mark.usefixtures("modules")
def test_what_the_budget_is_too_small_for_is_left_out() -> None:
    refused = Step("three ranks", why_not="valid sizes: 1, 2")
    outcomes = host.run_all([refused, step("good", needs_s=100), step("slow"), step("good")], 1)
    assert [outcome.verdict for outcome in outcomes] == ["left out"] * 4
    details = [
        "valid sizes: 1, 2",
        "1 s are left, and it needs 100 s",
        "the budget's last 1 s weren't enough",
        "0 s are left, and it needs 0 s",
    ]
    assert [outcome.detail for outcome in outcomes] == details


@pytest.mark.usefixtures("modules")
def test_a_fault_that_is_found_counts_however_little_time_is_left() -> None:
    (outcome,) = host.run_all([step("wrong")], 3)
    assert (outcome.verdict, outcome.faults) == ("FAILED", [{"passed": False}])


@pytest.mark.usefixtures("modules")
def test_processes_that_a_step_leaves_behind_are_killed() -> None:
    (outcome,) = host.run_all([step("parent")], 30)
    (finding,) = outcome.findings
    wait_for("the end of what was left", lambda: not psutil.pid_exists(finding["pid"]) or is_zombie(finding["pid"]))


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_large_groups_come_first_and_sizes_that_do_not_fit_are_left_out() -> None:
    steps = host.plan(8)
    names = [step.name for step in steps]
    assert names[:2] == ["ids of demo, tp 8", "ids of two-kv-heads, tp 8"]
    assert names.index("two groups of tp 4 on one queue") < names.index("sums, tp 8")
    assert [name for name in names if "qwen3-32b" in name] == [f"throughput of qwen3-32b, tp {n}" for n in (8, 4, 2, 1)]
    assert not any(step.why_not for step in steps)
    assert "valid sizes: 1, 2, 4, 8" in host.ids_step("demo", 3, "cpu", limit_s=1).why_not


def test_ranks_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ids of eight ranks and of two groups of two are those of one; the death of a rank is named and costs no row."""
    file = tmp_path / "found.jsonl"
    assert host.main(["--device", "cpu", "--max-tp", "8", "--tiny", "--json", str(file)]) == 0
    assert "terminate called" not in capfd.readouterr().err  # by ranks that lost one
    found = [json.loads(line) for line in file.read_text().splitlines()]
    checks = {finding["check"]: finding for finding in found if "check" in finding}
    assert {name: (finding["tp"], finding["passed"]) for name, finding in checks.items()} == {
        "ids": (8, True),
        "death in a call": (8, True),
        "groups": (2, True),
    }
    assert checks["ids"]["same_rows"] == checks["ids"]["rows"] > 0
    assert checks["groups"]["same_rows"] == checks["groups"]["row_indices"] == 40
    assert {finding["rows"] for finding in found if "gloo_us" in finding} == {1, 64}
    assert [finding["model"] for finding in found if "output_tok_s" in finding] == ["qwen3-30b-a3b/32"]
