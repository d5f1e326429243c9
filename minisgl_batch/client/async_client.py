"""The client for asyncio: the same calls, each awaited; what is iterated over there is iterated with `async for` here.

Calls run in threads, so that nothing blocks the event loop. Called by programs and notebooks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import update_wrapper
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from minisgl_batch.client.client import Client
from minisgl_batch.client.handle import POLL_S, JobHandle
from minisgl_batch.client.progress import Progress
from minisgl_jobs.model import RowResult
from minisgl_jobs.reader import Event, TokenReader
from minisgl_jobs.status import JobStatus

P = ParamSpec("P")
T = TypeVar("T")
MAX_AHEAD = 1000  # events that a stream reads before they are asked for
_SLOT_S = 0.2  # between looks of a reader's thread whether anybody still wants its events
_END: Any = object()


def _of_client(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A method of the Client, awaited."""

    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        client = await self._connected()
        return await asyncio.to_thread(method, client, *args, **kwargs)

    update_wrapper(call, method)
    return call


def _job_of_client(
    method: Callable[Concatenate[Client, P], JobHandle],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncJobHandle]]:
    """A method of the Client that answers a job, awaited."""
    answer = _of_client(method)

    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncJobHandle:
        return AsyncJobHandle(await answer(self, *args, **kwargs))

    update_wrapper(call, method)
    return call


def _of_job(
    method: Callable[Concatenate[JobHandle, P], T],
) -> Callable[Concatenate[AsyncJobHandle, P], Coroutine[Any, Any, T]]:
    """A method of the JobHandle, awaited."""

    async def call(self: AsyncJobHandle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._job, *args, **kwargs)

    update_wrapper(call, method)
    return call


class AsyncClient:
    """`Client` for asyncio. Use with `async with`, or await `close`; it connects when it is first used.

    Arguments, answers and errors are those of the `Client`'s methods of the same names.
    """

    def __init__(self, redis_url: str | None = None) -> None:
        self._redis_url = redis_url
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    submit = _job_of_client(Client.submit)
    job = _job_of_client(Client.job)
    jobs = _of_client(Client.jobs)
    workers = _of_client(Client.workers)
    overview = _of_client(Client.overview)
    pause = _of_client(Client.pause)
    resume = _of_client(Client.resume)
    purge = _of_client(Client.purge)

    async def close(self) -> None:
        """Close the connection; handles of jobs end with it."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        await self._connected()  # a wrong URL shows here
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                self._client = await asyncio.to_thread(Client, self._redis_url)
        return self._client


class AsyncJobHandle:
    """One job of an AsyncClient; see `JobHandle`, whose methods have the same names, arguments and errors."""

    def __init__(self, job: JobHandle) -> None:
        self.id = job.id
        self._job = job

    def __repr__(self) -> str:
        return f"AsyncJobHandle({self.id!r})"

    def _repr_html_(self) -> str:
        return self._job._repr_html_()

    status = _of_job(JobHandle.status)
    progress = _of_job(JobHandle.progress)
    cancel = _of_job(JobHandle.cancel)
    tend = _of_job(JobHandle.tend)
    retry = _of_job(JobHandle.retry)
    purge = _of_job(JobHandle.purge)
    results = _of_job(JobHandle.results)

    async def watch(self, poll_s: float = POLL_S) -> AsyncIterator[Progress]:
        """See `JobHandle.watch`."""
        watcher = self._job.watcher()
        while True:
            progress = await asyncio.to_thread(watcher.look)
            if progress is not None:
                yield progress
                if progress.state.is_final:
                    return
            await asyncio.sleep(poll_s)

    async def wait(self, timeout_s: float | None = None) -> JobStatus:
        """See `JobHandle.wait`."""
        watcher = self._job.watcher()
        while True:
            progress = await asyncio.to_thread(watcher.look)
            if progress is not None and progress.state.is_final:
                return progress.status
            watcher.check_time(timeout_s)
            await asyncio.sleep(POLL_S)

    async def stream(self, rows: Collection[int] | None = None) -> AsyncIterator[Event]:
        """See `JobHandle.stream`. Leaving the loop, or canceling its task, ends the reading."""
        reader = await asyncio.to_thread(self._job.open_reader, rows)
        async for event in _in_thread(reader):
            yield event

    async def rows(self, *, partial: bool = False) -> AsyncIterator[RowResult]:
        """See `JobHandle.rows`."""
        async for batch in self.batches(partial=partial):
            for row in await asyncio.to_thread(self._job.rows_of, batch):
                yield row

    async def batches(self, *, partial: bool = False) -> AsyncIterator[pa.RecordBatch]:
        """See `JobHandle.batches`."""
        batches: Iterator[pa.RecordBatch] = await asyncio.to_thread(lambda: self._job.batches(partial=partial))
        while (batch := await asyncio.to_thread(next, batches, _END)) is not _END:
            yield batch


async def _in_thread(reader: TokenReader) -> AsyncIterator[Event]:
    """The events of a reader that blocks, which has a thread of its own: streams are many, and wait for long."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Any] = asyncio.Queue()
    room = threading.Semaphore(MAX_AHEAD)

    def read() -> None:
        for event in reader:
            while not room.acquire(timeout=_SLOT_S):
                if reader.is_stopped:
                    return
            if reader.is_stopped:
                return
            loop.call_soon_threadsafe(events.put_nowait, event)

    def end(_: Future[None]) -> None:
        if not reader.is_stopped:
            loop.call_soon_threadsafe(events.put_nowait, _END)

    executor = ThreadPoolExecutor(1, thread_name_prefix="tokens")
    reading = executor.submit(read)
    reading.add_done_callback(end)
    try:
        while (event := await events.get()) is not _END:
            room.release()
            yield event
        reading.result()
    finally:
        reader.stop()
        executor.shutdown(wait=False)
