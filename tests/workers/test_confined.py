"""A worker that was started with `--allow-root`: what of a job's places it opens, and when it looks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.chunks import ChunkReference, encode_reference
from minisgl_jobs.leases import Lease
from minisgl_jobs.model import InputReference, JobSpec, JobState
from minisgl_jobs.roots import AllowedRoots
from minisgl_workers.embedded_redis import EmbeddedRedis
from minisgl_workers.loading import ChunkLoader
from tests.jobs.helpers import wait_for
from tests.workers.delivering import Group, group

MODEL = "confined"
TEXTS = ["a", "b"]


def submit(server: EmbeddedRedis, source: Path, output: Path) -> JobHandle:
    return Client(server.url).submit(source, model=MODEL, output=output, transport="reference")


def write_source(path: Path) -> Path:
    path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in TEXTS))
    return path


def check(job: JobHandle) -> None:
    assert job.status().state is JobState.FINISHED
    assert job.results()["text"].to_pylist() == [f"{text} 0 in epoch 0" for text in TEXTS]


def wait_for_refusal(worker: Group, job: JobHandle) -> str:
    def blocked() -> str:
        worker.tick()
        return job.status().blocked

    return wait_for("the refusal", blocked)


@pytest.mark.parametrize(
    ("place_in", "words"),
    [
        (lambda tmp: (tmp / "secret.jsonl", tmp / "open" / "out"), "may not be read by this worker"),
        (lambda tmp: (tmp / "open" / "link.jsonl", tmp / "open" / "out"), "may not be read by this worker"),
        (lambda tmp: (tmp / "open" / "in.jsonl", tmp / "out"), "may not be written by this worker"),
        (lambda tmp: (tmp / "open" / "in.jsonl", tmp / "open" / "way" / "out"), "may not be written by this worker"),
    ],
)
def test_paths_outside_the_roots_are_refused(
    place_in: Callable[[Path], tuple[Path, Path]],
    words: str,
    redis_server: EmbeddedRedis,
    client: redis.Redis,
    tmp_path: Path,
) -> None:
    (tmp_path / "open").mkdir()
    write_source(tmp_path / "open" / "in.jsonl")
    write_source(tmp_path / "secret.jsonl")
    (tmp_path / "open" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "open" / "way").symlink_to(tmp_path / "elsewhere")
    with group(client, MODEL, AllowedRoots([str(tmp_path / "open")])) as worker:
        job = submit(redis_server, *place_in(tmp_path))
        assert words in wait_for_refusal(worker, job)
        assert job.status().rows_done == 0
        job.cancel()
        worker.end_jobs()
        client.flushall()


def test_paths_under_the_roots_are_served(redis_server: EmbeddedRedis, client: redis.Redis, tmp_path: Path) -> None:
    with group(client, MODEL, AllowedRoots([str(tmp_path)])) as worker:
        job = submit(redis_server, write_source(tmp_path / "in.jsonl"), tmp_path / "out")
        worker.run_all()
        check(job)


def test_a_folder_that_leads_outside_by_the_time_its_part_is_written(
    redis_server: EmbeddedRedis, client: redis.Redis, tmp_path: Path
) -> None:
    """The chunk goes back with its results, and other jobs go on."""
    inside, outside, output = tmp_path / "in", tmp_path / "outside", tmp_path / "in" / "out"
    inside.mkdir()
    outside.mkdir()
    source = write_source(inside / "in.jsonl")
    with group(client, MODEL, AllowedRoots([str(inside)])) as worker:
        job = submit(redis_server, source, output)
        work = worker.take()
        output.rename(inside / "before")
        output.symlink_to(outside)
        worker.run(work)
        assert "may not be written by this worker" in wait_for_refusal(worker, job)
        assert not worker.delivery.trouble
        assert os.listdir(outside) == []
        other = submit(redis_server, source, inside / "other")
        wait_for("the other job's chunk", lambda: worker.tick() or worker.delivery.works)
        (work,) = worker.delivery.works
        worker.run(work)
        worker.commit(work)
        worker.end_jobs()
        check(other)
        output.unlink()
        (inside / "before").rename(output)
        worker.delivery._loader._pauses.clear()
        worker.run_all()
        check(job)
        assert len(worker.ran) == 2 * len(TEXTS)  # none was generated again


URLS_OUTSIDE = [
    "ftp://127.0.0.1:1/x",
    "memory://elsewhere/x",
    "memory://bucket/in/../x",
    "reference://x",
    "zip://x::file:///etc/hostname",
    "simplecache::memory://bucket/in",
]


@pytest.mark.parametrize("url", URLS_OUTSIDE)
@pytest.mark.parametrize("what", ["input", "output"])
def test_no_store_is_made_of_a_url_outside_the_roots(
    url: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some connect to a host or open a file as soon as they are made."""
    made: list[str] = []
    monkeypatch.setattr("minisgl_jobs.places.open_store", made.append)
    spec = JobSpec("j", MODEL, 1, 1, str(tmp_path), reference=InputReference(str(tmp_path / "none")))
    if what == "input":
        spec = msgspec.structs.replace(spec, reference=InputReference(url))
    else:
        spec = msgspec.structs.replace(spec, output=url)
    loader = ChunkLoader(AllowedRoots([str(tmp_path), "memory://bucket/in"]))
    loader.start(Lease(spec, 0, "t", 0, 1, encode_reference(ChunkReference(("",), 0, 0, b"")), {}))
    ((_, reason),) = wait_for("the refusal", lambda: loader.loaded()[1])
    loader.close()
    assert f"may not be {'read' if what == 'input' else 'written'} by this worker" in reason
    assert not made
