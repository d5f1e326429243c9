"""Input from and output to an S3 store: a worker group in processes, and what a crash between two requests leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minisgl_batch.client import Client
from minisgl_batch.errors import OutputError
from minisgl_jobs.dataset import read_dataset, read_manifest
from minisgl_jobs.model import JobState, RowResult
from minisgl_jobs.parts import PartInfo, commit_part, pending_name, remove_leftovers, scan_parts, write_part
from minisgl_jobs.places import place
from minisgl_jobs.results import results_to_table
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.jobs.s3_server import s3_server
from tests.processes import Command
from tests.workers.echo_group import MODEL, EchoGroupConfig

READY_S = 60.0
Store = tuple[dict[str, str], dict[str, bytes]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with s3_server() as (variables, objects):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables, objects


def test_a_job_from_a_bucket_to_a_bucket(store: Store) -> None:
    variables, objects = store
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"question": [f"q {i}" for i in range(50)], "id": range(50)}), sink, row_group_size=20)
    objects["data/in.parquet"] = bytes(sink.getvalue())
    with EmbeddedRedis.private() as server, Client(server.url) as client:
        config = EchoGroupConfig(redis_url=server.url, allow_roots=("s3://bucket/data",))
        encoded = msgspec.json.encode(config).decode()
        with Command(encoded, module="tests.workers.echo_group", **variables) as worker:
            worker.wait_for("serving", READY_S)
            job = client.submit(
                "s3://bucket/data/in.parquet",
                model=MODEL,
                output="s3://bucket/data/out",
                prompt_column="question",
                keep_columns=["id"],
                chunk_rows=16,
                max_tokens=3,
                transport="reference",
            )
            wait_for("the end of the job", lambda: job.status().state is JobState.FINISHED, 60)
            table = job.results()
            worker.signal(signal.SIGTERM)
            worker.finish()
    assert table["row_index"].to_pylist() == table["id"].to_pylist() == list(range(50))
    manifest = json.loads(objects["data/out/_manifest.json"])
    names = {part["name"] for part in manifest["parts"]}
    found = {key.removeprefix("data/out/") for key in objects if key.startswith("data/out/")}
    assert found - {""} == {"_SUCCESS", "_manifest.json", *names}
    secret = variables["AWS_SECRET_ACCESS_KEY"]
    assert secret not in worker.stderr + worker.stdout
    assert secret.encode() not in b"".join(objects.values())


def test_a_crash_at_any_request_of_a_commit(store: Store) -> None:
    """Written, copied, removed: whatever was done, doing it again gives one whole part."""
    _, objects = store
    folder = place("s3://bucket/out")
    info = PartInfo(job_id="j", chunk=0, epoch=0, input_sha256="x", num_rows=1)
    table = results_to_table([RowResult(row_index=0, text="a")])
    pending = f"out/{pending_name(0, 0, 't')}"
    for num_done in range(3):
        objects.clear()
        write_part(folder, table, info, "t")
        assert [part.name for part in scan_parts(folder)] == []
        if num_done:
            objects["out/part-000000.parquet"] = objects[pending]
        if num_done == 2:
            del objects[pending]
        commit_part(folder, 0, 0, "t")
        assert [part.name for part in scan_parts(folder)] == ["part-000000.parquet"]
        assert read_dataset(folder).num_rows == 1
        assert pending not in objects
    with pytest.raises(OutputError, match="has vanished"):
        commit_part(folder, 1, 0, "t")
    write_part(folder, table, info, "zombie")
    assert remove_leftovers(folder, 0) == 1
    assert read_manifest(folder) is None


def test_a_store_that_is_away_is_an_output_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as (variables, _):
        for name, value in {**variables, "AWS_MAX_ATTEMPTS": "1"}.items():
            monkeypatch.setenv(name, value)
    info = PartInfo(job_id="j", chunk=0, epoch=0, input_sha256="x", num_rows=1)
    with pytest.raises(OutputError, match=r"s3://bucket/out/.* can't be written"):
        write_part(place("s3://bucket/out"), results_to_table([RowResult(row_index=0)]), info, "t")
