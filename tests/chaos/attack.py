"""Strikes a world at random until its job is finished, and says what came of it."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from minisgl_batch.client import Client
from minisgl_batch.errors import QueueError
from minisgl_jobs.dataset import MANIFEST, SUCCESS, read_dataset
from minisgl_jobs.row_texts import RowFinished, RowStarted, RowText
from tests.chaos.world import JOB, NUM_TOKENS, World, prompt_ids
from tests.jobs.helpers import wait_for

RESUME_S = 1.0  # how long a group that goes on may take to see what it has missed, on a busy machine
KINDS = ("frontend", "rank", "tasks", "supervisor", "stop")


@dataclass
class Attack:
    """One job under attack.

    Attributes:
        strikes: what was done, how often.
        timeline: and when, for whoever looks into a failure.
        num_rounds: how often each group is struck in each of the ways there are.
        num_restarts: of Redis, spread over the job.
        pause_s: between a group that serves and the next strike at it, at most.
        end_s: how long it all may take.
    """

    world: World
    rng: random.Random
    num_rounds: int
    num_restarts: int
    pause_s: float
    end_s: float
    strikes: Counter[str] = field(default_factory=Counter)
    timeline: list[str] = field(default_factory=list)
    _resumes: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _errors: list[BaseException] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Submit, strike, wait for the end, and judge; the answer is the summary."""
        started = time.monotonic()
        self._submit()
        reader = Reader(self.world)
        strikers = [threading.Thread(target=self._guarded, args=(self._strike_group, n)) for n in range(2)]
        strikers.append(threading.Thread(target=self._guarded, args=(self._strike_readers,)))
        strikers.append(threading.Thread(target=self._guarded, args=(self._strike_redis,)))
        for thread in [reader, *strikers]:
            thread.start()
        try:
            wait_for("the end of the job", lambda: self._errors or self._is_over(), self.end_s)
        finally:
            self._over.set()
            for thread in strikers:
                thread.join(60)
        assert not self._errors, self._errors
        reader.join(60)
        wall_s = time.monotonic() - started
        for number in range(len(self.world.groups)):
            self.world.wait_serving(number, 1)
        self.world.drain()
        return {
            **judge(self.world, reader, self._resumes),
            "wall_s": round(wall_s, 1),
            "strikes": dict(sorted(self.strikes.items())),
        }

    # -------------------------------------------------------------- strikes

    def _submit(self) -> None:
        """By clients of which the first ones are killed."""
        for _ in range(2):
            with self.world.start_submit() as command:
                self._over.wait(self.rng.uniform(0.3, 1.5))
            self._note("client")
        with self.world.start_submit() as command:
            command.finish(timeout_s=120)

    def _strike_group(self, number: int) -> None:
        world, rng = self.world, random.Random(self.rng.random())
        kinds = [kind for _ in range(self.num_rounds) for kind in rng.sample(KINDS, len(KINDS))]
        num_times = 1
        while kinds and not self._over.is_set():
            world.wait_serving(number, num_times)
            self._over.wait(rng.uniform(0, self.pause_s))
            if self._over.is_set():
                return
            kind = kinds[-1]
            if kind == "supervisor":
                world.groups[number].signal(signal.SIGKILL)
                world.old_groups.append(world.groups[number])
                world.groups[number] = world.start_group()
                num_times = 1
            elif kind == "stop":
                self._pause(number)
            else:
                process = world.find(number, kind)
                if process is None:
                    continue
                process.kill()
                num_times += kind != "tasks"
            kinds.pop()
            self._note(kind, f"of group {number}")

    def _pause(self, number: int) -> None:
        """Stop a whole group for longer than its leases."""
        stopped = self.world.processes(number)
        _signal(stopped, psutil.Process.suspend)
        self._over.wait(self.world.lease_s + 1.0)
        self._resumes.append(time.monotonic())
        self.timeline.append(f"{self._resumes[-1]:.3f} go on group {number}")
        _signal(stopped, psutil.Process.resume)

    def _strike_readers(self) -> None:
        while not self._over.is_set():
            with self.world.start_tail() as tail:
                self._over.wait(self.rng.uniform(1.0, 6.0))
                tail.kill()
            self._note("subscriber")

    def _strike_redis(self) -> None:
        for restart in range(self.num_restarts):
            part = (restart + self.rng.uniform(0.3, 0.9)) / (self.num_restarts + 0.2)
            while self._rows_done() < part * self.world.num_rows:
                if self._over.wait(0.2):
                    return
            self.world.server.kill()
            self._over.wait(self.rng.uniform(0.2, 1.5))
            self.world.server.start()
            self._note("redis")

    def _note(self, kind: str, what: str = "") -> None:
        self.strikes[kind] += 1
        self.timeline.append(f"{time.monotonic():.3f} {kind} {what}")

    def _guarded(self, strike: Callable[..., None], *args: int) -> None:
        try:
            strike(*args)
        except BaseException as error:
            self._errors.append(error)
            raise

    # ------------------------------------------------------------- progress

    def _rows_done(self) -> int:
        try:
            with Client(self.world.server.url) as client:
                return client.job(JOB).status().rows_done
        except QueueError:
            return 0

    def _is_over(self) -> bool:
        time.sleep(0.1)
        try:
            with Client(self.world.server.url) as client:
                return client.job(JOB).status().state.is_final
        except QueueError:
            return False


class Reader(threading.Thread):
    """A reader that lives through it all, and knows at the end the text of each row."""

    def __init__(self, world: World) -> None:
        super().__init__(daemon=True)
        self._url = world.server.url
        self.texts: dict[int, str] = {}
        self.num_ends: Counter[int] = Counter()

    def run(self) -> None:
        with Client(self._url) as client:
            for event in client.job(JOB).stream():
                match event:
                    case RowStarted():
                        self.texts[event.row_index] = ""
                    case RowText():
                        self.texts[event.row_index] += event.text
                    case RowFinished():
                        self.num_ends[event.row_index] += 1


def judge(world: World, reader: Reader, resumes: Sequence[float]) -> dict[str, Any]:
    """Compare what came out with what went in. `resumes` is when stopped groups went on."""
    with Client(world.server.url) as client:
        status = client.job(JOB).status()
    table = read_dataset(world.output)
    rows = table["row_index"].to_pylist()
    wrong = sum(
        not (ids == np.resize(prompt_ids(row), NUM_TOKENS).tolist() or error == "worker_lost")
        for row, ids, error in zip(
            rows, table["output_token_ids"].to_pylist(), table["error_type"].to_pylist(), strict=True
        )
    )
    texts = dict(zip(rows, table["text"].to_pylist(), strict=True))
    names = sorted(path.name for path in world.output.iterdir())
    return {
        "state": status.state.value,
        "chunks": status.spec.num_chunks,
        "rows_in": world.num_rows,
        "rows_out": len(rows),
        "rows_missing_or_twice": len(set(range(world.num_rows)).symmetric_difference(rows))
        + len(rows)
        - len(set(rows)),
        "rows_wrong": wrong,
        "rows_given_up": sum(error == "worker_lost" for error in table["error_type"].to_pylist()),
        "rows_begun": sum(1 for _ in world.read_log(world.begun)),
        "finished_rows_generated_again": len(after_their_end(world, world.ended, resumes)),
        # A group that was stopped past its lease, and goes on, may find rows in the sockets between its processes. It
        # stops them as soon as it has heard that others have them.
        "finished_rows_begun_after_a_pause": len(after_their_end(world, world.begun)),
        "reader_rows_wrong": sum(reader.texts.get(row) != text for row, text in texts.items()),
        "reader_rows_ended": len(reader.num_ends),
        "success_files": names.count(SUCCESS),
        "files_left_over": len([name for name in names if not name.startswith("part-")]) - len({SUCCESS, MANIFEST}),
        "processes_left_over": len(world.left_behind()),
        "directories_left_over": len(list((world.folder / "tmp").iterdir())),
        "deaths_counted": status.num_deaths,
    }


def after_their_end(world: World, log: Path, resumes: Sequence[float] = ()) -> list[tuple[int, float, float]]:
    """Rows that came to an engine after Redis had confirmed their results; with when they were finished and came.

    Args:
        log: of all rows that came, or of those that were generated to their end.
        resumes: rows that came right after one of these times are passed over.
    """
    finished: dict[int, float] = {}
    for at_s, row in world.read_log(world.finished):
        finished.setdefault(row, at_s)
    return [
        (row, finished[row], at_s)
        for at_s, row in world.read_log(log)
        if at_s > finished.get(row, at_s) and not any(0 <= at_s - resume < RESUME_S for resume in resumes)
    ]


def check(summary: dict[str, Any]) -> None:
    """Raise AssertionError for what must never be."""
    rows = summary["rows_in"]
    expected = {
        "rows_out": rows,
        "rows_missing_or_twice": 0,
        "rows_wrong": 0,
        "finished_rows_generated_again": 0,
        "reader_rows_wrong": 0,
        "reader_rows_ended": rows,
        "success_files": 1,
        "files_left_over": 0,
        "processes_left_over": 0,
        "directories_left_over": 0,
        "state": "partial" if summary["rows_given_up"] else "finished",
    }
    assert {name: summary[name] for name in expected} == expected, summary


def _signal(processes: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            send(process)
        except psutil.NoSuchProcess:  # noqa: PERF203
            continue
