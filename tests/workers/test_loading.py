"""Chunks whose rows are read where they lie: by delivery, with its thread, against a real queue."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.chunks import ChunkReference, encode_chunk, encode_reference
from minisgl_jobs.dataset import read_manifest
from minisgl_jobs.leases import Lease
from minisgl_jobs.model import InputReference, JobSpec, JobState, Row
from minisgl_jobs.places import place
from minisgl_jobs.references import ChunkReader, ChunkRows
from minisgl_workers import loading
from minisgl_workers.embedded_redis import EmbeddedRedis
from minisgl_workers.loading import ChunkLoader
from tests.jobs.helpers import wait_for
from tests.workers.delivering import Group, group

MODEL = "loaded"
NUM_ROWS = 40


@pytest.fixture
def source(tmp_path: Path, rng: random.Random) -> Path:
    """A table whose rows are too long to be taken for each other's."""
    rows = [{"text": f"{i} {rng.randbytes(4).hex()}", "id": i * i, "unused": None} for i in range(NUM_ROWS)]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def submit(server: EmbeddedRedis, source: Path | str, output: Path | str, **options: Any) -> JobHandle:
    client = Client(server.url)
    options = {"prompt_column": "text", "keep_columns": ["id", "text"], "chunk_rows": 16, **options}
    return client.submit(source, model=MODEL, output=output, transport="reference", **options)


def run_all(worker: Group, job: JobHandle) -> None:
    """Answer all rows of a job, and end it."""
    while not job.status().state.is_final:
        worker.tick()
        for work in list(worker.delivery.works):
            worker.run(work)
            worker.commit(work)
        worker.end_jobs()


def check(job: JobHandle, source: Path) -> None:
    rows, inputs = job.results().to_pylist(), pq.read_table(source).to_pylist()
    assert [row["row_index"] for row in rows] == list(range(len(inputs)))
    assert [(row["id"], row["input_text"]) for row in rows] == [(row["id"], row["text"]) for row in inputs]
    assert [row["text"] for row in rows] == [f"{row['text']} 0 in epoch 0" for row in inputs]


def test_rows_by_reference_come_out_with_their_columns(
    redis_server: EmbeddedRedis, client: redis.Redis, source: Path, tmp_path: Path
) -> None:
    with group(client, MODEL) as worker:
        job = submit(redis_server, source, tmp_path / "out")
        run_all(worker, job)
        check(job, source)
        names = pq.read_schema(tmp_path / "out" / "part-000000.parquet").names
        assert names[-2:] == ["id", "input_text"]


def test_a_retry_keeps_the_columns(
    redis_server: EmbeddedRedis, client: redis.Redis, source: Path, tmp_path: Path
) -> None:
    with group(client, MODEL) as worker:
        job = submit(redis_server, source, tmp_path / "out")
        for _ in range(3):
            work = worker.take()
            worker.run(work, fails=lambda row: row.row_index % 5 == 0)
            worker.commit(work)
        worker.end_jobs()
        assert job.status().state is JobState.PARTIAL
        job.retry()
        partial = job.results(partial=True)
        assert partial["id"].to_pylist() == [i * i for i in partial["row_index"].to_pylist()]
        run_all(worker, job)
        assert job.results()["id"].to_pylist() == [i * i for i in range(NUM_ROWS)]


def test_a_canceled_job_keeps_the_columns_of_its_finished_rows(
    redis_server: EmbeddedRedis, client: redis.Redis, source: Path, tmp_path: Path
) -> None:
    with group(client, MODEL) as worker:
        job = submit(redis_server, source, tmp_path / "out")
        work = worker.take()
        part = work.next_part()
        assert part is not None
        work.start(part)
        for row in part[:3]:
            worker.generate(work, row, 0)
        job.cancel()
        worker.give_up(work)
        worker.end_jobs()
        assert job.results().select(["row_index", "id"]).to_pylist() == [
            {"row_index": i, "id": i * i} for i in range(3)
        ]


def test_rows_that_changed_fail_and_the_others_finish(
    redis_server: EmbeddedRedis, client: redis.Redis, source: Path, tmp_path: Path
) -> None:
    with group(client, MODEL) as worker:
        job = submit(redis_server, source, tmp_path / "out")
        table = pq.read_table(source)
        texts = table["text"].to_pylist()
        texts[20] = "changed"
        pq.write_table(table.set_column(0, "text", pa.array(texts)), source)
        run_all(worker, job)
        assert job.status().state is JobState.PARTIAL
        rows = job.results().to_pylist()
        assert {row["error_type"] for row in rows[16:32]} == {"input_changed"}
        assert {row["status"] for row in rows[:16] + rows[32:]} == {"ok"}
        assert [row["id"] for row in rows[14:18]] == [196, 225, None, None]


def test_a_worker_that_cannot_read_the_input_leaves_the_job_to_others(
    redis_server: EmbeddedRedis,
    client: redis.Redis,
    source: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says why in its log and in the job's status, and doesn't take the job again and again."""
    hidden = source.rename(tmp_path / "hidden")
    with group(client, MODEL) as worker:
        other = submit(redis_server, hidden, tmp_path / "other")
        os.link(hidden, source)
        job = submit(redis_server, source, tmp_path / "out")
        source.unlink()
        takes: list[str] = []
        start = worker.delivery._loader.start
        monkeypatch.setattr(
            worker.delivery._loader,
            "start",
            lambda lease: (takes.append(lease.spec.job_id), start(lease)),
        )
        with caplog.at_level(logging.ERROR):
            run_all(worker, other)
            for _ in range(50):
                worker.tick()
        assert takes.count(job.id) == 1
        assert "is left to other workers for 5 s" in caplog.text
        assert "in.parquet: there is no such file" in caplog.text
        status = job.status()
        assert status.waiting == f"group-1 can't take it: {source}: there is no such file (looked in {os.getcwd()})"
        assert (status.num_deaths, status.leases) == (0, ())
        os.link(hidden, source)
        worker.delivery._loader = ChunkLoader()
        run_all(worker, job)
        check(job, source)


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 1000.0
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: now))
    loader = ChunkLoader()
    lease = _lease(tmp_path)
    lengths = []
    for _ in range(6):
        loader.start(lease)
        wait_for("the reading", lambda: loader.loaded()[1])
        begun = now
        assert loader.avoided == ["j"]
        while loader.avoided:
            now += 1
        lengths.append(now - begun)
    loader.close()
    assert lengths == [5, 10, 20, 40, 60, 60]


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """Inputs by reference that don't answer, as on a hung mount: one event once somebody waits, the other to let go."""
    waits, answers = Event(), Event()
    read = ChunkReader._read_reference

    def wait_and_read(*args: Any) -> ChunkRows:
        waits.set()
        answers.wait()
        return read(*args)

    monkeypatch.setattr(ChunkReader, "_read_reference", wait_and_read)
    yield waits, answers
    answers.set()


def test_a_slow_store_holds_no_other_job_back(tmp_path: Path, hung: tuple[Event, Event]) -> None:
    (tmp_path / "none").write_text('{"prompt": "b"}\n')
    loader = ChunkLoader()
    loader.start(_lease(tmp_path))
    spec = JobSpec("quick", MODEL, 1, 1, str(tmp_path))
    quick = Lease(spec, 0, "q", 0, 1, encode_chunk([Row(row_index=0, prompt="a")]), {})
    loader.start(quick)
    (work,) = wait_for("the quick one", lambda: loader.loaded()[0])
    assert work.job_id == "quick"
    assert [lease.spec.job_id for lease in loader.leases] == ["j"]
    hung[1].set()
    (work,) = wait_for("the slow one", lambda: loader.loaded()[0])
    assert work.job_id == "j"
    loader.close()


def test_a_pipe_in_place_of_the_input_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "none")  # which couldn't be opened until somebody writes
    loader = ChunkLoader()
    loader.start(_lease(tmp_path))
    ((_, reason),) = wait_for("the refusal", lambda: loader.loaded()[1])
    assert reason == f"{tmp_path}/none can't be read: it is a pipe or a device, not a file"
    loader.close()


def test_an_input_that_never_answers_stops_its_own_job_only(
    redis_server: EmbeddedRedis,
    client: redis.Redis,
    source: Path,
    tmp_path: Path,
    hung: tuple[Event, Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others start though its chunks fill the intake; it goes back with a reason; and nothing waits for its thread."""
    monkeypatch.setattr(loading, "SLOW_S", 0.05)
    monkeypatch.setattr(loading, "FIRST_PAUSE_S", 0.0)
    waits, answers = hung
    with group(client, MODEL) as worker:
        worker.delivery._loader = ChunkLoader(limit_s=2)
        job = submit(redis_server, source, tmp_path / "out")
        wait_for("the reading", lambda: worker.tick() or waits.is_set())
        other = Client(redis_server.url).submit(["a", "b"], model=MODEL, output=tmp_path / "other")
        run_all(worker, other)
        assert other.status().state is JobState.FINISHED
        wait_for("the reason", lambda: worker.tick() or job.status().waiting)
        assert job.status().waiting == f"group-1 can't take it: {source} can't be read: no answer within 2 s"
        assert worker.delivery._loader.avoided == [job.id]  # its thread is still at it
        answers.set()
        wait_for("the thread", lambda: not worker.delivery._loader.avoided)
        run_all(worker, job)
        check(job, source)


def test_closing_waits_for_no_input(tmp_path: Path, hung: tuple[Event, Event]) -> None:
    loader = ChunkLoader()
    loader.start(_lease(tmp_path))
    assert hung[0].wait(30)
    loader.close()
    assert not hung[1].is_set()
    threads = [thread for thread in threading.enumerate() if thread.name == "input" and thread.is_alive()]
    assert threads
    assert all(thread.daemon for thread in threads)


def _lease(tmp_path: Path) -> Lease:
    """A chunk whose row is in a file `none`."""
    spec = JobSpec("j", MODEL, 1, 1, str(tmp_path), reference=InputReference(str(tmp_path / "none")))
    payload = encode_reference(ChunkReference(("",), 0, 0, b""))
    return Lease(spec, 0, "t", 0, 1, payload, {})


# --- outputs in other places -----------------------------------------------------------------------------------------


def test_output_to_an_object_store(redis_server: EmbeddedRedis, client: redis.Redis, source: Path) -> None:
    """No rename there: parts are copied inside the store; the manifest comes last."""
    store = fsspec.filesystem("memory")
    store.put(str(source), "/bucket/in.parquet")
    output = "memory://bucket/deep/out"
    with group(client, MODEL) as worker:
        job = submit(redis_server, "memory://bucket/in.parquet", output)
        assert store.cat("/bucket/deep/out/_JOB").startswith(job.id.encode())
        work = worker.take()
        worker.run(work)
        worker.commit(work)
        assert [path.rpartition("/")[2] for path in store.ls("/bucket/deep/out", detail=False)] == [
            "_JOB",
            "part-000000.parquet",
        ]
        run_all(worker, job)
        check(job, source)
        manifest = read_manifest(place(output))
        assert manifest is not None
        assert [part.num_bytes for part in manifest.parts] == [
            store.info(f"/bucket/deep/out/{part.name}")["size"] for part in manifest.parts
        ]
        parts = {part.name for part in manifest.parts}
        assert set(place(output).names()) == {"_SUCCESS", "_manifest.json", *parts}
    store.rm("/bucket", recursive=True)


def test_output_by_a_file_url(redis_server: EmbeddedRedis, client: redis.Redis, source: Path, tmp_path: Path) -> None:
    with group(client, MODEL) as worker:
        job = submit(redis_server, source.as_uri(), (tmp_path / "out put").as_uri())
        run_all(worker, job)
        check(job, source)
        assert job.status().spec.output == str(tmp_path / "out put")
        assert (tmp_path / "out put" / "_SUCCESS").exists()
