"""The asyncio client: the same jobs, awaited; nothing of it blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis

from minisgl_batch import AsyncClient, JobState
from minisgl_batch.client.async_client import MAX_AHEAD, _in_thread
from minisgl_batch.errors import JobNotFoundError, JobStateError, JobTimeoutError, UsageError
from minisgl_jobs.reader import Event, JobChanged
from minisgl_jobs.row_texts import RowFinished, RowText
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.minisgl_batch.echo_worker import GROWING, MODEL, EchoWorker

DEADLINE_S = 20.0
Run = Callable[[Callable[[AsyncClient], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(client: redis.Redis, redis_server: EmbeddedRedis) -> Run:
    """Runs a coroutine function with a client, in a loop of its own that must never be blocked for long."""
    assert client.dbsize() == 0

    def run_test(test: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with AsyncClient(redis_server.url) as api:
                await asyncio.wait_for(test(api), 3 * DEADLINE_S)

        asyncio.run(main())

    return run_test


def tokens_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tokens")]


def test_from_submit_to_results(run: Run, client: redis.Redis, tmp_path: Path) -> None:
    async def test(api: AsyncClient) -> None:
        job = await api.submit(["a", "b", "fail"], model=MODEL, output=tmp_path / "out", chunk_rows=2, max_tokens=5)
        assert (await job.status()).state is JobState.QUEUED
        with EchoWorker(client):
            assert [p.state async for p in job.watch(0.01)][-1] is JobState.PARTIAL
            assert (await job.wait(DEADLINE_S)).state is JobState.PARTIAL
            events = [event async for event in job.stream()]
            assert events[-1] == JobChanged(JobState.PARTIAL)
            assert sorted(e.row_index for e in events if isinstance(e, RowFinished)) == [0, 1, 2]
            assert [row.text async for row in job.rows()] == ["echo a", "echo b", ""]
            assert (await job.results())["text"].to_pylist() == ["echo a", "echo b", None]
            assert [batch.num_rows async for batch in job.batches()] == [2, 1]
            await job.retry()
            assert (await job.wait(DEADLINE_S)).epoch == 1
            assert [found.job_id for found in await api.jobs()] == [job.id]
            assert (await api.overview()).jobs[0].rows_done == 3
            assert [worker.model for worker in await api.workers()] == [MODEL]
        await job.purge()
        with pytest.raises(JobNotFoundError):
            await api.job(job.id)

    run(test)


def test_typed_errors_and_states(run: Run, tmp_path: Path) -> None:
    async def test(api: AsyncClient) -> None:
        await api.pause(MODEL)
        job = await api.submit(["a"], model=MODEL, output=tmp_path)
        with pytest.raises(TimeoutError, match=f"job {job.id} is still queued after 0.01 s") as caught:
            await job.wait(0.01)
        assert isinstance(caught.value, JobTimeoutError)
        assert (caught.value.job_id, caught.value.state) == (job.id, "queued")
        with pytest.raises(JobStateError):
            await job.retry()
        with pytest.raises(UsageError, match="has no row 5"):
            await anext(job.stream([5]))
        assert await api.resume(MODEL)
        await job.cancel()
        assert (await job.wait(DEADLINE_S)).state is JobState.CANCELED
        assert await api.purge() == [job.id]

    run(test)


def test_many_streams_and_waits_at_once_do_not_wait_for_each_other(
    run: Run, client: redis.Redis, tmp_path: Path
) -> None:
    """More than there are threads in asyncio's own pool."""

    async def test(api: AsyncClient) -> None:
        jobs = [await api.submit([f"p{i}", "x"], model=MODEL, output=tmp_path / str(i)) for i in range(12)]

        async def read(index: int) -> str:
            return "".join([e.text async for e in jobs[index].stream([0]) if isinstance(e, RowText)])

        readers = [asyncio.create_task(read(index)) for index in range(12)]
        waits = [asyncio.create_task(job.wait(DEADLINE_S)) for job in jobs for _ in range(3)]
        blocked = asyncio.create_task(_longest_pause())
        await asyncio.sleep(0)
        with EchoWorker(client):
            assert await asyncio.gather(*readers) == [f"echo p{index}" for index in range(12)]
            assert {status.state for status in await asyncio.gather(*waits)} == {JobState.FINISHED}
        blocked.cancel()

    run(test)


async def _longest_pause() -> None:
    """Fails when the loop is blocked for seconds; generous, as machines that test are busy."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        assert time.monotonic() - before < 5


def test_leaving_a_stream_ends_its_reading(run: Run, client: redis.Redis, tmp_path: Path) -> None:
    async def test(api: AsyncClient) -> None:
        with EchoWorker(client, hold=True) as worker:
            job = await api.submit(["a", "b"], model=MODEL, output=tmp_path)
            async for progress in job.watch(0.01):
                if progress.status.num_spooled:
                    break  # the worker holds now, and shows new readers a text that grows
            stream = job.stream()
            async for event in stream:
                if isinstance(event, RowText) and event.text == GROWING:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            task = asyncio.create_task(_drain(job.stream()))
            await asyncio.to_thread(wait_for, "the second reader", lambda: len(tokens_threads()) >= 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_for, "the end of all readers", lambda: not tokens_threads())
            worker.go_on.set()
            assert (await job.wait(DEADLINE_S)).state is JobState.FINISHED

    run(test)


async def _drain(stream: AsyncIterator[Event]) -> None:
    async for _ in stream:
        pass


class Endless:
    """A reader that always has an event, and fails at last."""

    def __init__(self, num_events: int) -> None:
        self.num_read = 0
        self.is_stopped = False
        self._num_events = num_events

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> Event:
        if self.num_read == self._num_events:
            raise JobNotFoundError("it has expired")
        self.num_read += 1
        return JobChanged(JobState.RUNNING)

    def stop(self) -> None:
        self.is_stopped = True


def test_a_slow_consumer_holds_the_reader_up_and_errors_arrive() -> None:
    async def test() -> None:
        reader = Endless(3 * MAX_AHEAD)
        stream = _in_thread(reader)  # type: ignore[arg-type]
        await anext(stream)
        await asyncio.to_thread(wait_for, "the reader to run ahead", lambda: reader.num_read > MAX_AHEAD)
        assert reader.num_read <= MAX_AHEAD + 2
        with pytest.raises(JobNotFoundError, match="it has expired"):
            await _drain(stream)
        assert reader.num_read == 3 * MAX_AHEAD

    asyncio.run(test())
