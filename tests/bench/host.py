"""Checks and measures tensor parallelism on a host of several GPUs, within ten minutes; a line of JSON per finding.

    python -m tests.bench.host --json results.jsonl
    python -m tests.bench.host --device cpu --max-tp 8 --tiny     # the same on a CPU: whether it runs, not how fast

Checks come first, then measurements, the largest groups before smaller ones. Each step is a process of its own with a
time limit, and what it leaves behind is killed. A step that fails or takes too long stops no other; one that needs more
than is left of the budget is left out. The exit code is 1 if a check failed, or a step broke. MINISGL_COMMIT names the
commit where git can't.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.hub import model_path
from minisgl_batch.models.config import load_model_config
from tests.bench.records import COMMIT_VARIABLE, commit
from tests.processes import environment

BUDGET_S = 570.0
SIZES = (8, 4, 2)
SHAPES = ("qwen3-32b", "qwen3-14b", "qwen3-30b-a3b")
MODELS = ("demo", "two-kv-heads")
ROWS = (1, 8, 32, 64, 128, 256, 1024, 8192)
LOOK_S = 1.0
MARGIN_S = 5.0  # between a step's own end, which says where it hangs, and its being killed
LEFT_S = 5.0  # what daemons have to see that nobody needs them
GPU_COUNT = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True)
class Step:
    """What one process does.

    Attributes:
        name: for people.
        command: a module of ours and its arguments; prints findings as lines of JSON.
        limit_s: it is killed after so long.
        needs_s: it isn't started with less than that left.
        why_not: why it is left out, whatever is left.
    """

    name: str
    command: tuple[str, ...] = ()
    limit_s: float = 0.0
    needs_s: float = 0.0
    why_not: str = ""


@dataclass
class Outcome:
    """What came of a step.

    Attributes:
        verdict: "ok", "FAILED" or "left out".
        detail: why; "" for nothing to say.
    """

    step: Step
    verdict: str
    detail: str = ""
    seconds: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def faults(self) -> list[dict[str, Any]]:
        """What was checked and isn't so."""
        return [finding for finding in self.findings if finding.get("passed") is False]


def plan(max_tp: int) -> list[Step]:
    """For a host of `max_tp` GPUs or more."""
    sizes = [size for size in SIZES if size <= max_tp]
    steps = [ids_step(model, tp, "cuda", limit_s=150, needs_s=20) for tp in sizes for model in MODELS]
    if max_tp >= 2:
        job = ("--rows", "160", "--tokens", "400")
        steps.append(groups_step(max_tp // 2, "cuda", *job, limit_s=180, needs_s=30))
    for tp in [*sizes, 1]:
        if tp > 1:
            steps.append(sums_step(tp, "cuda", "--rows", *map(str, ROWS), limit_s=90, needs_s=20))
        steps += [bench_step(shape, tp, "cuda", "U", "S", limit_s=180, needs_s=50) for shape in SHAPES]
    return steps


def tiny_plan(max_tp: int) -> list[Step]:
    """For CPUs: each kind of step once, and little to do in it."""
    half, quarter = max(2, max_tp // 2), max(2, max_tp // 4)
    return [
        ids_step("two-kv-heads", max_tp, "cpu", "--rows", "6", "--tokens", "8", limit_s=120),
        groups_step(quarter, "cpu", "--rows", "40", "--tokens", "8", "--leave-early", limit_s=180),
        sums_step(half, "cpu", "--rows", "1", "64", "--hidden-size", "64", limit_s=60),
        bench_step("qwen3-30b-a3b", quarter, "cpu", "U", "--shrink", "32", "--num-pages", "256", limit_s=60),
    ]


def ids_step(model: str, tp: int, device: str, *more: str, **limits: float) -> Step:
    name = f"ids of {model}, tp {tp}"
    try:
        if model == "demo":  # the other one is made for all sizes
            load_model_config(model_path(model)).check_tp_size(tp)
    except InvalidParameterError as error:
        return Step(name, why_not=str(error))
    command = ("tests.bench.host_checks", "ids", "--model", model, "--tp", str(tp), "--device", device, *more)
    return Step(name, command, **limits)


def groups_step(tp: int, device: str, *more: str, **limits: float) -> Step:
    command = ("tests.bench.host_checks", "groups", "--tp", str(tp), "--device", device, *more)
    return Step(f"two groups of tp {tp} on one queue", command, **limits)


def sums_step(tp: int, device: str, *more: str, **limits: float) -> Step:
    return Step(f"sums, tp {tp}", ("tests.bench.multigpu", "--tp", str(tp), "--device", device, *more), **limits)


def bench_step(shape: str, tp: int, device: str, *more: str, **limits: float) -> Step:
    """`more` begins with the workloads."""
    what = ("--model", shape, "--dummy-weights", "--max-running", "256")
    where = ("--tp", str(tp), "--device", device, "--commit", commit())
    return Step(f"throughput of {shape}, tp {tp}", ("minisgl_batch", "bench", *more, *what, *where), **limits)


def run_all(steps: Iterable[Step], budget_s: float, file: IO[str] | None = None) -> list[Outcome]:
    """Run them one after another; findings are printed as they come, and go to `file` too."""
    deadline = time.monotonic() + budget_s
    outcomes = []
    for step in steps:
        left_s = deadline - time.monotonic()
        if step.why_not:
            outcome = Outcome(step, "left out", step.why_not)
        elif left_s <= step.needs_s:
            outcome = Outcome(step, "left out", f"{max(0.0, left_s):.0f} s are left, and it needs {step.needs_s:.0f} s")
        else:
            limit_s = min(step.limit_s, left_s)
            outcome = run(step, limit_s, file)
            was_cut = limit_s < step.limit_s and outcome.seconds > limit_s - MARGIN_S
            if outcome.verdict == "FAILED" and was_cut and not outcome.faults:
                outcome.verdict, outcome.detail = "left out", f"the budget's last {limit_s:.0f} s weren't enough"
        outcomes.append(outcome)
        say(f"{outcome.verdict}: {step.name} ({outcome.seconds:.1f} s) {outcome.detail}")
    return outcomes


def run(step: Step, limit_s: float, file: IO[str] | None) -> Outcome:
    """Run one; returns when all its processes are gone."""
    started = time.monotonic()
    say(f"{step.name}, at most {limit_s:.0f} s: python -m {' '.join(step.command)}")
    timeout_s = max(1.0, limit_s - MARGIN_S)
    command = [sys.executable, "-m", *step.command, "--timeout-s", f"{timeout_s:g}"]
    outcome = Outcome(step, "ok")
    family: dict[int, psutil.Process] = {}
    with tempfile.NamedTemporaryFile() as output, open(output.name, encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=output, env=environment(**{COMMIT_VARIABLE: commit()}))
        try:
            while process.poll() is None and time.monotonic() - started < limit_s:
                remember(process.pid, family)
                take_findings(said, outcome, file)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
            if process.poll() is None:
                outcome.verdict, outcome.detail = "FAILED", f"it took longer than {limit_s:.0f} s"
        finally:
            end(process, family)
        take_findings(said, outcome, file)
    outcome.seconds = time.monotonic() - started
    if outcome.verdict == "ok" and process.returncode != 0:
        outcome.verdict, outcome.detail = "FAILED", f"exit code {process.returncode}"
    elif outcome.verdict == "ok" and not outcome.findings:
        outcome.verdict, outcome.detail = "FAILED", "it found nothing"
    return outcome


def take_findings(said: IO[str], outcome: Outcome, file: IO[str] | None) -> None:
    """What a step has found since; a line that isn't whole yet is for the next time."""
    position = said.tell()
    while (line := said.readline()).endswith("\n"):
        position = said.tell()
        try:
            outcome.findings.append(json.loads(line))
        except json.JSONDecodeError:
            say(line.rstrip())  # something that a library had to say
            continue
        print(line, end="", flush=True)
        if file is not None:
            file.write(line)
            file.flush()
    said.seek(position)


def remember(pid: int, family: dict[int, psutil.Process]) -> None:
    """Note a process's children and theirs, some of which would outlive it."""
    with suppress(psutil.NoSuchProcess):
        family.update({child.pid: child for child in psutil.Process(pid).children(recursive=True)})


def end(process: subprocess.Popen[Any], family: dict[int, psutil.Process]) -> None:
    """End a step that isn't over, and those that it started."""
    if process.poll() is None:
        remember(process.pid, family)
        process.kill()
        process.wait()
    until = time.monotonic() + LEFT_S
    while (left := [other for other in family.values() if is_alive(other)]) and time.monotonic() < until:
        time.sleep(0.1)
    for other in left:
        say(f"killing process {other.pid}, which was left behind")
        with suppress(psutil.NoSuchProcess):
            other.kill()


def is_alive(process: psutil.Process) -> bool:
    """Not over, even if nobody has waited for its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def num_gpus() -> int:
    """Asks a process of its own: this one shall not hold any."""
    return int(subprocess.run([sys.executable, "-c", GPU_COUNT], capture_output=True, check=True).stdout)


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument(
        "--max-tp", type=int, choices=sorted((*SIZES, 1)), help="default: as many as there are GPUs; 8 on a CPU"
    )
    parser.add_argument("--tiny", action="store_true", help="little work, for CPUs; the figures mean nothing")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all of it")
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="steps with one of these in the name")
    parser.add_argument("--json", type=Path, help="append the findings to this file")
    given = parser.parse_args(args)
    if given.tiny != (given.device == "cpu"):
        parser.error("--tiny and --device cpu go together")
    if given.tiny and given.max_tp == 1:
        parser.error("--tiny is about groups: --max-tp 2 and more")
    if given.max_tp is None:
        found = num_gpus() if given.device == "cuda" else max(SIZES)
        fitting = [size for size in (*SIZES, 1) if size <= found]
        if not fitting:
            parser.error("there is no GPU: --device cpu --tiny")
        given.max_tp = fitting[0]
    return given


def main(args: Sequence[str] | None = None) -> int:
    given = parse(args)
    steps = tiny_plan(given.max_tp) if given.tiny else plan(given.max_tp)
    steps = [step for step in steps if any(text in step.name for text in given.only)]
    # As in tests.bench.multigpu.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    started = time.monotonic()
    if given.json is None:
        outcomes = run_all(steps, given.budget_s)
    else:
        with given.json.open("a", encoding="utf-8") as file:
            outcomes = run_all(steps, given.budget_s, file)
    say(f"\n{time.monotonic() - started:.0f} s on {given.max_tp} {given.device} devices:")
    for outcome in outcomes:
        say(f"  {outcome.verdict:8} {outcome.step.name:40} {outcome.seconds:6.1f} s  {outcome.detail}")
        for finding in outcome.findings:
            if "output_tok_s" in finding:
                say(f"{'':11}{finding['workload']}: {finding['output_tok_s']:,.0f} tokens/s")
        for fault in outcome.faults:
            say(f"{'':11}{fault}")
    return 1 if any(outcome.verdict == "FAILED" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
