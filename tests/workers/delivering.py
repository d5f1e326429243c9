"""A worker group without an engine: the real delivery, whose rows a test finishes by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from minisgl_batch.errors import RequestError
from minisgl_batch.tokenizer import SampleOutput
from minisgl_jobs.finalise import finalise
from minisgl_jobs.leases import LEASE_S, ChunkQueue
from minisgl_jobs.model import EngineInfo, JobState, Row
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.roots import AllowedRoots
from minisgl_jobs.status import WorkerInfo
from minisgl_jobs.tasks import task_queue
from minisgl_workers.delivery import Delivery
from minisgl_workers.lease_keeper import LeaseKeeper
from minisgl_workers.work import ChunkWork
from tests.jobs.helpers import wait_for

MODEL = "some/model"


class Group:
    """Attributes: ran: (row, sample) of all that was generated, in order."""

    def __init__(
        self,
        client: redis.Redis,
        model: str,
        low_water: int = 1,
        *,
        name: str = "group-1",
        lease_s: float = LEASE_S,
        roots: AllowedRoots | None = None,
        engine: EngineInfo | None = None,
    ) -> None:
        self.client = client
        self.queue, kept = (ChunkQueue(client, model, name, lease_s=lease_s, engine=engine) for _ in range(2))
        self.info = WorkerInfo(name, model, description=engine or {})
        self.keeper = LeaseKeeper(kept)  # renews when a test says so
        name = self.queue.keys.queue
        self.outbox = Outbox(client, name)
        tasks = task_queue(client, name)
        self.delivery = Delivery(self.queue, self.keeper, self.outbox, tasks, low_water=low_water, roots=roots)
        self.ran: list[tuple[int, int]] = []

    def tick(self) -> None:
        self.delivery._due["tasks"] = 0.0  # a test needn't wait for the next look
        self.delivery.tick(self.info, take=True)

    def take(self) -> ChunkWork:
        """A chunk, which must be there."""

        def taken() -> list[ChunkWork]:
            self.tick()
            return self.delivery.works

        return wait_for("a chunk", taken)[-1]

    def give_up(self, work: ChunkWork) -> None:
        """Wait until a chunk's rows are stopped, and empty the list of those to stop."""

        def is_stopped() -> bool:
            self.delivery.tick(self.info, take=False)
            return work in self.delivery.stopped

        wait_for("the rows to stop", is_stopped)
        self.delivery.stopped.clear()

    def run(self, work: ChunkWork, fails: Callable[[Row], bool] = lambda _: False) -> None:
        """Generate what is left of a chunk."""
        while (part := work.next_part()) is not None:
            work.start(part)
            for row in part:
                for sample in work.missing_samples(row):
                    self.generate(work, row, sample, fails=fails(row))

    def generate(self, work: ChunkWork, row: Row, sample: int, *, fails: bool = False) -> None:
        self.ran.append((row.row_index, sample))
        error = RequestError("refused", "as the test wishes") if fails else None
        text = f"{row.prompt} {sample} in epoch {work.lease.epoch}"
        output = SampleOutput(0, "" if fails else text, [1, 2], "error" if fails else "stop", None, 3, 0, None, error)
        work.finish(row, sample, 7, time.time(), output, str)

    def commit(self, work: ChunkWork, *, is_renamed: bool = True) -> None:
        """Wait until a complete chunk is committed and, unless that is to fail, its rename confirmed."""

        def is_committed() -> bool:
            self.delivery.tick(self.info, take=False)
            renames = self.queue.keys.job(work.job_id, "renames")
            is_confirmed = not self.client.hexists(renames, str(work.lease.chunk))
            return work not in self.delivery.works and (is_confirmed or not is_renamed)

        wait_for("the commit", is_committed)

    def run_some(self, work: ChunkWork, num_rows: int) -> list[Row]:
        """Generate the first rows of a chunk and spool them; returns those that are left."""
        part = work.next_part()
        assert part is not None
        work.start(part)
        for row in part[:num_rows]:
            self.generate(work, row, 0)

        def is_spooled() -> bool:
            self.delivery.tick(self.info, take=False)
            return not work.unspooled

        wait_for("the spool", is_spooled)
        return part[num_rows:]

    def run_all(self) -> None:
        """Serve until all jobs have ended."""

        def is_done() -> bool:
            self.tick()
            for work in list(self.delivery.works):
                self.run(work)
            self.end_jobs()
            return all(job.state.is_final for job in JobQueue(self.client).jobs())

        wait_for("the end of all jobs", is_done, 30)

    def end_jobs(self) -> None:
        """Finalise what is to be finalised, in place of the RQ worker."""
        for job in JobQueue(self.client).jobs():
            if job.state is JobState.FINALISING:
                finalise(self.outbox, job.job_id, job.epoch)


@contextmanager
def group(
    client: redis.Redis, model: str, roots: AllowedRoots | None = None, engine: EngineInfo | None = None
) -> Iterator[Group]:
    made = Group(client, model, roots=roots, engine=engine)
    yield made
    made.delivery.hand_back()


def part_bytes(folder: Path) -> dict[str, bytes]:
    """The parts of a dataset by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}
