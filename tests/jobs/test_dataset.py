"""Datasets on disk: parts that are whole or not there, manifest and success mark, what a new job may overwrite."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from minisgl_batch.errors import (
    OutputDamagedError,
    OutputError,
    OutputLostError,
    OutputNotAllowedError,
    SchemaVersionError,
)
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.dataset import (
    MANIFEST,
    SUCCESS,
    Manifest,
    check_dataset,
    check_output,
    clear_dataset,
    finish_dataset,
    make_manifest,
    missing_chunks,
    read_batches,
    read_dataset,
    read_manifest,
    reopen_dataset,
)
from minisgl_jobs.model import EngineInfo, InputInfo, JobSpec, JobState, RowError, RowResult
from minisgl_jobs.owner import OWNER, claim_output, read_owner, take_output
from minisgl_jobs.parts import (
    PartInfo,
    commit_part,
    output_place,
    part_name,
    pending_name,
    read_part,
    remove_leftovers,
    scan_parts,
    write_part,
)
from minisgl_jobs.results import result_schema, results_to_table
from minisgl_jobs.roots import AllowedRoots

CHUNK_ROWS = 4


def make_table(chunk: int, text: str = "Ahoj 안녕 👩‍💻") -> pa.Table:
    rows = range(chunk * CHUNK_ROWS, (chunk + 1) * CHUNK_ROWS)
    return results_to_table([RowResult(row_index=row, text=text, finished_at=1.0) for row in rows])


def add_part(
    folder: Path, chunk: int, epoch: int = 0, text: str = "a", job_id: str = "j", engine: EngineInfo | None = None
) -> Path:
    info = PartInfo(job_id=job_id, chunk=chunk, epoch=epoch, input_sha256=f"sha-{chunk}", num_rows=CHUNK_ROWS)
    info = msgspec.structs.replace(info, engines=[engine] if engine else [])
    token = os.urandom(4).hex()
    write_part(folder, make_table(chunk, text), info, token)
    return commit_part(folder, chunk, epoch, token)


def make_spec(folder: Path, num_chunks: int) -> JobSpec:
    return JobSpec(
        job_id="j",
        model="demo",
        num_rows=num_chunks * CHUNK_ROWS,
        chunk_rows=CHUNK_ROWS,
        output=str(folder),
        params=SamplingParams(max_tokens=5),
        seed=7,
        submitted_at=1_700_000_000.0,
        input=InputInfo("in.jsonl", "abc", 9),
    )


def make(folder: Path, num_chunks: int, state: JobState, epoch: int = 0) -> Manifest:
    return make_manifest(
        make_spec(folder, num_chunks),
        scan_parts(folder),
        state=state,
        epoch=epoch,
        num_ok=num_chunks * CHUNK_ROWS,
        num_errors=0,
    )


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def test_finished_dataset_reads_back_whole(tmp_path: Path, rng: random.Random) -> None:
    folder = tmp_path / "deep" / "output"
    chunks = list(range(rng.randint(2, 12)))
    rng.shuffle(chunks)
    for chunk in chunks:
        add_part(folder, chunk, text="Ahoj 안녕 👩‍💻")
    finish_dataset(folder, make(folder, len(chunks), JobState.FINISHED))

    assert names(folder) == {MANIFEST, SUCCESS, *(part_name(chunk) for chunk in chunks)}
    table = read_dataset(folder)
    assert table.schema == result_schema()
    assert table.column("row_index").to_pylist() == list(range(len(chunks) * CHUNK_ROWS))
    assert set(table.column("text").to_pylist()) == {"Ahoj 안녕 👩‍💻"}
    assert read_dataset(folder, ["text", "row_index"]).num_columns == 2
    assert pyarrow.dataset.dataset(folder).to_table(columns=["row_index", "text"]).num_rows == table.num_rows
    assert pq.read_table(folder).num_rows == table.num_rows


def test_part_says_whose_it_is(tmp_path: Path) -> None:
    path = add_part(tmp_path, 41, epoch=2)
    (part,) = scan_parts(tmp_path)
    assert (part.name, part.num_bytes) == ("part-000041.parquet", path.stat().st_size)
    assert part.info == PartInfo(job_id="j", chunk=41, epoch=2, input_sha256="sha-41", num_rows=CHUNK_ROWS)
    assert pq.read_metadata(path).row_group(0).column(4).compression == "ZSTD"


def test_names_sort_as_numbers_also_past_a_million(tmp_path: Path) -> None:
    for chunk in (1_000_000, 999_999, 9):
        add_part(tmp_path, chunk)
    assert [part.info.chunk for part in scan_parts(tmp_path)] == [9, 999_999, 1_000_000]


def test_manifest_tells_what_ran(tmp_path: Path) -> None:
    engine: EngineInfo = {"dtype": "float32", "tp": 1, "default_sampling": {"temperature": 0.6, "top_k": 9}}
    for chunk in range(2):
        add_part(tmp_path, chunk, engine=engine)
    written = make(tmp_path, 2, JobState.PARTIAL)
    finish_dataset(tmp_path, written)
    assert read_manifest(tmp_path) == written
    shown = json.loads((tmp_path / MANIFEST).read_text())
    assert shown["schema_version"] == 1
    assert shown["engines"] == [engine]
    assert shown["state"] == "partial"
    assert shown["seed"] == 7
    assert shown["sampling"] == {"max_tokens": 5}
    used = shown["effective_sampling"]
    assert (used["max_tokens"], used["temperature"], used["top_k"], used["top_p"]) == (5, 0.6, 9, 1.0)
    add_part(tmp_path, 1, engine={**engine, "default_sampling": {"temperature": 0.7}})
    assert make(tmp_path, 2, JobState.PARTIAL).effective_sampling is None  # there isn't one of all rows
    for chunk in range(2):
        add_part(tmp_path, chunk, engine={**engine, "default_sampling": {"temperature": -7}})
    assert make(tmp_path, 2, JobState.PARTIAL).effective_sampling is None
    assert shown["input"] == {"source": "in.jsonl", "sha256": "abc", "num_bytes": 9}
    assert shown["submitted_at"] == "2023-11-14T22:13:20Z"
    assert shown["parts"][0]["name"] == "part-000000.parquet"
    assert shown["parts"][0]["num_rows"] == CHUNK_ROWS


def test_success_stands_only_beside_a_complete_dataset(tmp_path: Path) -> None:
    add_part(tmp_path, 0)
    finish_dataset(tmp_path, make(tmp_path, 1, JobState.PARTIAL))
    finish_dataset(tmp_path, make(tmp_path, 1, JobState.PARTIAL))
    assert SUCCESS in names(tmp_path)
    reopen_dataset(tmp_path, "j")
    reopen_dataset(tmp_path, "j")
    assert SUCCESS not in names(tmp_path)
    for state in (JobState.CANCELED, JobState.FAILED):
        (tmp_path / SUCCESS).touch()
        finish_dataset(tmp_path, make(tmp_path, 3, state))
        assert names(tmp_path) == {MANIFEST, part_name(0)}
        assert read_dataset(tmp_path).num_rows == CHUNK_ROWS


def test_incomplete_or_mixed_parts_make_no_manifest(tmp_path: Path) -> None:
    add_part(tmp_path, 0)
    add_part(tmp_path, 2)
    assert missing_chunks(make_spec(tmp_path, 4), scan_parts(tmp_path)) == [1, 3]
    with pytest.raises(OutputError, match=r"lacks 2 parts, the first is part-000001\.parquet"):
        make(tmp_path, 4, JobState.FINISHED)
    add_part(tmp_path, 1, job_id="other")
    with pytest.raises(OutputError, match=r"another job, such as part-000001\.parquet"):
        make(tmp_path, 3, JobState.CANCELED)


def test_commit_may_be_repeated_and_never_invents_a_part(tmp_path: Path) -> None:
    info = PartInfo(job_id="j", chunk=0, epoch=0, input_sha256="x", num_rows=CHUNK_ROWS)
    pending = write_part(tmp_path, make_table(0), info, "t1")
    assert names(tmp_path) == {pending.name} == {pending_name(0, 0, "t1")}
    with pytest.raises(OutputError, match="holds no results yet"):
        read_dataset(tmp_path)
    assert commit_part(tmp_path, 0, 0, "t1") == commit_part(tmp_path, 0, 0, "t1") == tmp_path / part_name(0)
    for chunk, epoch in ((1, 0), (0, 1)):
        with pytest.raises(OutputError, match="has vanished"):
            commit_part(tmp_path, chunk, epoch, "t2")


def test_a_folder_that_leads_out_of_the_roots_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside, folder = tmp_path / "in", tmp_path / "outside", tmp_path / "in" / "out"
    folder.mkdir(parents=True)
    outside.mkdir()
    (outside / pending_name(0, 0, "t")).write_bytes(b"not ours")
    before, roots = names(outside), AllowedRoots([str(inside)])
    write_table = pq.write_table

    def swap_and_write(*args: Any, **options: Any) -> None:
        folder.rmdir()
        folder.symlink_to(outside)
        write_table(*args, **options)

    monkeypatch.setattr(pq, "write_table", swap_and_write)
    info = PartInfo(job_id="j", chunk=0, epoch=0, input_sha256="x", num_rows=CHUNK_ROWS)
    with pytest.raises(OutputNotAllowedError, match="may not be written by this worker"):
        write_part(folder, make_table(0), info, "new", roots=roots)
    with pytest.raises(OutputNotAllowedError, match="may not be written by this worker"):
        commit_part(folder, 0, 0, "t", roots=roots)
    assert names(outside) == before


def test_an_output_under_roots_is_where_its_links_led_when_it_was_checked(tmp_path: Path) -> None:
    (tmp_path / "in" / "real").mkdir(parents=True)
    link = tmp_path / "in" / "link"
    link.symlink_to("real")
    assert output_place(str(link), AllowedRoots([str(tmp_path / "in")])) == tmp_path.resolve() / "in" / "real"
    assert output_place(str(link), AllowedRoots()) == output_place(str(link)) == link


def test_retry_replaces_the_part_of_the_epoch_before(tmp_path: Path) -> None:
    add_part(tmp_path, 0, epoch=0, text="old")
    add_part(tmp_path, 0, epoch=1, text="new")
    assert set(read_dataset(tmp_path).column("text").to_pylist()) == {"new"}


def test_killed_writers_leave_nothing_that_counts(tmp_path: Path) -> None:
    """A writer is killed right before its rename; an older worker's and a later epoch's files lie about as well."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from minisgl_jobs.model import RowResult
        from minisgl_jobs.parts import PartInfo, write_part
        from minisgl_jobs.results import results_to_table
        info = PartInfo(job_id="j", chunk=1, epoch=1, input_sha256="x", num_rows=1)
        write_part(Path(sys.argv[1]), results_to_table([RowResult(row_index=4)]), info, "dead")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], env=environment, check=False)
    assert died.returncode == -9
    (tmp_path / ".part-0-000000.zombie").write_bytes(b"half")
    (tmp_path / ".part-2-000001.alive").write_bytes(b"work")
    add_part(tmp_path, 0, epoch=1)
    assert read_dataset(tmp_path).num_rows == CHUNK_ROWS
    assert remove_leftovers(tmp_path, epoch=1) == 2
    assert names(tmp_path) == {part_name(0), ".part-2-000001.alive"}
    assert remove_leftovers(tmp_path / "nowhere", epoch=1) == 0


def test_failed_write_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes makes writes fail half-way as a full disk does."""
    script = """
        import random, resource, sys
        from pathlib import Path
        from minisgl_batch.errors import OutputError
        from minisgl_jobs.model import RowResult
        from minisgl_jobs.parts import PartInfo, write_file, write_part
        from minisgl_jobs.results import results_to_table
        folder = Path(sys.argv[1])
        table = results_to_table([RowResult(row_index=0, text=random.randbytes(1 << 20).hex())])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        info = PartInfo(job_id="j", chunk=1, epoch=0, input_sha256="x", num_rows=1)
        for write in (lambda: write_part(folder, table, info, "t"), lambda: write_file(folder / "_m", bytes(1 << 20))):
            try:
                write()
            except OutputError as error:
                print(error)
    """
    add_part(tmp_path, 0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == [
        f"{tmp_path}/.part-0-000001.t can't be written: File too large",
        f"{tmp_path}/_m can't be written: File too large",
    ]
    assert names(tmp_path) == {part_name(0)}


def test_full_disk_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_jobs.parts.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    info = PartInfo(job_id="j", chunk=0, epoch=0, input_sha256="x", num_rows=CHUNK_ROWS)
    with pytest.raises(OutputError, match=r"1024 KiB are free; up to \d{4} KiB are needed"):
        write_part(tmp_path, make_table(0, "a" * (1 << 20)), info, "t")


def test_output_in_a_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(OutputError, match="file"):
            add_part(folder, 0)
        with pytest.raises(OutputError, match="file"):
            check_output(folder)


def test_damaged_datasets_are_named(tmp_path: Path) -> None:
    add_part(tmp_path, 0)
    path = add_part(tmp_path, 1)
    finish_dataset(tmp_path, make(tmp_path, 2, JobState.FINISHED))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(OutputError, match=r"part-000001\.parquet can't be read"):
        list(read_batches(tmp_path))
    with pytest.raises(OutputDamagedError, match=r"part-000001\.parquet isn't a whole part"):
        read_part(path)
    assert [part.name for part in scan_parts(tmp_path)] == ["part-000000.parquet"]
    path.unlink()
    with pytest.raises(OutputError, match=r"part-000001\.parquet can't be read"):
        read_dataset(tmp_path)
    (tmp_path / MANIFEST).write_text('{"schema_version": 99}')
    with pytest.raises(SchemaVersionError):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(OutputError, match=r"_manifest\.json can't be read"):
        read_manifest(tmp_path)
    with pytest.raises(OutputError, match="no such folder"):
        read_dataset(tmp_path / "nowhere")


def test_job_canceled_before_its_first_part_reads_as_empty(tmp_path: Path) -> None:
    finish_dataset(tmp_path, make(tmp_path, 3, JobState.CANCELED))
    assert read_dataset(tmp_path).schema == result_schema()
    assert read_dataset(tmp_path, ["text"]).num_rows == 0


def test_what_a_new_job_may_write_to(tmp_path: Path) -> None:
    check_output(tmp_path)
    check_output(tmp_path / "a" / "b")
    (tmp_path / "notes.txt").touch()
    check_output(tmp_path)

    add_part(tmp_path, 0)
    with pytest.raises(OutputError, match="parts of a job that isn't finished: choose another folder"):
        check_output(tmp_path)
    finish_dataset(tmp_path, make(tmp_path, 1, JobState.FINISHED))
    with pytest.raises(OutputError, match=r"a dataset: .*`overwrite`"):
        check_output(tmp_path)
    check_output(tmp_path, overwrite=True)
    (tmp_path / ".part-0-000007.dead").touch()
    clear_dataset(tmp_path)
    assert names(tmp_path) == {"notes.txt"}

    (tmp_path / "train.parquet").touch()
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"aren't ours, such as train\.parquet"):
            check_output(tmp_path, overwrite=overwrite)


@pytest.mark.parametrize("name", ["notes.txt", "older/part-000000.parquet", "_notes.txt", ".cache/x"])
def test_what_breaks_readers_of_the_folder_is_warned_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_part(tmp_path, 0)
    finish_dataset(tmp_path, make(tmp_path, 1, JobState.FINISHED))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((tmp_path / part_name(0)).read_bytes() if name.endswith(".parquet") else b"")
    try:
        is_readable = pq.read_table(tmp_path).num_rows == read_dataset(tmp_path).num_rows
    except pa.ArrowInvalid:
        is_readable = False
    check_output(tmp_path, overwrite=True)
    warned = f"{tmp_path} holds other things, such as {Path(name).parts[0]}, which break tools"
    assert (warned in caplog.text) is not is_readable


@pytest.mark.parametrize("state", [JobState.FINISHED, JobState.CANCELED])
def test_a_job_that_has_ended_lets_its_folder_go(tmp_path: Path, state: JobState) -> None:
    claim_output(tmp_path, "j")
    add_part(tmp_path, 0)
    finish_dataset(tmp_path, make(tmp_path, 1, state))
    assert OWNER not in names(tmp_path)


def test_manifest_counts_tokens_and_cut_and_failed_texts(tmp_path: Path) -> None:
    for chunk, types in enumerate((["constraint_failed"], ["constraint_failed", "worker_lost"])):
        results = [
            RowResult(chunk, finish_reason="length", prompt_tokens=10, cached_tokens=4, completion_tokens=7),
            *(
                RowResult(chunk, sample_index, status="error", finish_reason="error", error=RowError(name, "why"))
                for sample_index, name in enumerate(types, 1)
            ),
        ]
        info = PartInfo(job_id="j", chunk=chunk, epoch=0, input_sha256="", num_rows=len(results))
        write_part(tmp_path, results_to_table(results), info, "t")
        commit_part(tmp_path, chunk, 0, "t")
    manifest = make(tmp_path, 2, JobState.FINISHED)
    assert (manifest.prompt_tokens, manifest.cached_tokens, manifest.completion_tokens) == (20, 8, 14)
    assert manifest.num_cut == 2
    assert manifest.num_by_error_type == {"constraint_failed": 2, "worker_lost": 1}
    assert [part.info.num_failed for part in scan_parts(tmp_path)] == [1, 1]


def test_failures_of_a_part_from_before_they_were_counted_by_type_are_of_some_type(tmp_path: Path) -> None:
    """So that they aren't passed over beside others', by which a retry would be of no use."""
    add_part(tmp_path, 0)
    table = pq.read_table(tmp_path / part_name(0))
    info = json.loads(table.schema.metadata[b"minisgl_batch"])
    del info["num_by_error_type"]
    described = table.replace_schema_metadata({"minisgl_batch": json.dumps(info | {"num_failed": 2})})
    pq.write_table(described, tmp_path / part_name(0))
    assert make(tmp_path, 1, JobState.PARTIAL).num_by_error_type == {"unknown": 2}


def test_a_claim_gets_its_job_later(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 1)
    take_output(tmp_path, spec.job_id, "")
    assert read_owner(tmp_path) is None
    claim_output(tmp_path, spec.job_id, spec)
    assert read_owner(tmp_path) == spec


def test_a_dataset_of_another_release_is_not_this_jobs(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"schema_version": 99}')
    with pytest.raises(OutputLostError, match="doesn't hold the dataset of job j: "):
        check_dataset(tmp_path, "j")
