"""Everything that chaos strikes: a Redis, two worker groups, clients, readers, and what they leave behind."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.jobs.helpers import wait_for
from tests.jobs.own_server import OwnServer
from tests.processes import Command
from tests.workers.echo_group import MODEL, start_echo_group
from tests.workers.echo_rank import EchoConfig

JOB = "chaos"
NUM_TOKENS = 8
READY_S = 120.0
SETTLE_S = 20.0
MODULES = {"frontend": "tests.chaos.noting_frontend", "rank": "tests.workers.echo_rank", "tasks": "task_runner"}


def prompt_ids(row: int) -> list[int]:
    """A row's prompt: another one for each, made of ids that the demo model has."""
    return [2 + row // 1000, 2 + row % 1000]


def row_of(ids: list[int]) -> int:
    """The way back."""
    return (ids[0] - 2) * 1000 + ids[1] - 2


class World:
    """A folder with it all. Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        num_rows: int,
        chunk_rows: int,
        lease_s: float,
        step_s: float,
        transport: str = "--by-value",
    ) -> None:
        """
        Args:
            transport: the option that says how rows come to the workers.
        """
        self.folder = folder
        self.num_rows = num_rows
        self.lease_s = lease_s
        self.output = folder / "out"
        self.begun = folder / "begun"  # rows that came to an engine
        self.ended = folder / "begun.ended"  # rows that an engine has generated to their end, with when they came to it
        self.finished = folder / "finished"  # rows that Redis has confirmed
        self.chunk_rows = chunk_rows
        self.server = OwnServer(Path(tempfile.mkdtemp(prefix="mb-", dir=folder)))
        self._step_s = step_s
        self._transport = transport
        (folder / "tmp").mkdir()
        self._input = folder / "rows.jsonl"
        with self._input.open("w") as file:
            file.writelines(json.dumps({"prompt_token_ids": prompt_ids(row)}) + "\n" for row in range(num_rows))
        self.groups = [self.start_group() for _ in range(2)]
        self.old_groups: list[Command] = []

    def start_group(self) -> Command:
        engine = EchoConfig(max_running=64, step_s=self._step_s, log=str(self.begun))
        return start_echo_group(
            self.server.url,
            engine=engine,
            lease_s=self.lease_s,
            drain_s=2.0,
            spool_log=str(self.finished),
            variables={"TMPDIR": str(self.folder / "tmp")},
        )

    def command(self, *args: object) -> Command:
        """A command of a user."""
        return Command(*args, cwd=self.folder, MINISGL_REDIS=self.server.url)

    def start_submit(self) -> Command:
        """Submit the job; the same again if that was done before."""
        options = ("--output", self.output, "--max-tokens", NUM_TOKENS, "--ignore-eos", "--token-ids", "--seed", 1)
        chunk_rows = ("--chunk-rows", self.chunk_rows, self._transport)
        return self.command("submit", self._input, "--model", MODEL, "--job-id", JOB, *chunk_rows, *options)

    def start_tail(self) -> Command:
        return self.command("tail", JOB)

    def wait_serving(self, number: int, num_times: int) -> None:
        """Wait until a group serves for the so manieth time.

        One that can't start because Redis is away says so and ends, and is started again, as by a service manager.
        """

        def serves() -> bool:
            group = self.groups[number]
            if not lives(group):
                assert "Redis" in group.stdout, f"a group gave up: {group.stdout}{group.stderr}"
                assert "serving" not in group.stdout, f"a group gave up: {group.stdout}{group.stderr}"
                self.groups[number] = self.start_group()
            return group.stdout.count("serving") >= num_times

        wait_for("a group that serves", serves, READY_S)

    def processes(self, number: int) -> list[psutil.Process]:
        """A group's processes, the supervisor first."""
        try:
            supervisor = psutil.Process(self.groups[number].pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def find(self, number: int, kind: str) -> psutil.Process | None:
        """The frontend, rank or task runner of a group, when it has one at the moment."""
        found = (process for process in self.processes(number) if _has_word(process, MODULES[kind]))
        return next(found, None)

    def read_log(self, path: Path) -> Iterator[tuple[float, int]]:
        """(monotonic seconds, row) of a log of rows or prompts."""
        for line in path.read_text().splitlines():
            seconds, _, what = line.partition(" ")
            ids = list(map(int, what.split(",")))
            yield float(seconds), row_of(ids) if len(ids) > 1 else ids[0]

    def close(self) -> None:
        for group in [*self.groups, *self.old_groups]:
            group.kill()
        self.settle()
        self.server.kill()

    def settle(self) -> None:
        """Give processes that have lost their parents the time to leave."""
        deadline = time.monotonic() + SETTLE_S
        while self.left_behind() and time.monotonic() < deadline:
            time.sleep(0.05)

    def left_behind(self) -> list[str]:
        """Processes that work in this world's temporary folder."""
        folder = str(self.folder / "tmp")
        return [str(process) for process in psutil.process_iter() if _works_in(process, folder)]

    def drain(self) -> None:
        """Stop both groups in order."""
        for group in self.groups:
            group.signal(signal.SIGTERM)
        for group in self.groups:
            group.finish()
        self.settle()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lives(command: Command) -> bool:
    """Whether a command still runs."""
    try:
        return psutil.Process(command.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_word(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in word for word in process.cmdline())
    except psutil.Error:
        return False


def _works_in(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get("TMPDIR") == folder
    except psutil.Error:
        return False
