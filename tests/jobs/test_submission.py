"""Jobs before they are queued: what is checked, what comes out, and that a submission can be given up."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from minisgl_batch.errors import InvalidInputError, InvalidParameterError, JobNotFoundError, OutputError, UsageError
from minisgl_batch.sampling_params import MAX_SEED, SamplingParams
from minisgl_jobs import submission as submissions
from minisgl_jobs.chunks import decode_chunk
from minisgl_jobs.keys import is_job_id
from minisgl_jobs.model import Priority, Row
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.submission import Submission, new_job_id, output_folder, prepare


def rows_of(submission: Submission) -> list[Row]:
    return [row for _, payload in submission.payloads() for row in decode_chunk(payload)]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_chunks_hold_all_rows_in_order(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "_IN_MEMORY_BYTES", 2000)  # so that larger ones go to a file
    prompts = [rng.randbytes(rng.randrange(1, 200)).hex() for _ in range(rng.randrange(1, 300))]
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    chunk_rows = rng.randrange(1, 257)
    with prepare(source, model="m", output=tmp_path / "out", chunk_rows=chunk_rows) as submission:
        spec = submission.spec
        for _ in range(2):  # a submission that failed half-way is sent again
            assert [row.prompt for row in rows_of(submission)] == prompts
        sizes = [len(decode_chunk(payload)) for _, payload in submission.payloads()]
        assert sizes == [len(spec.chunk_range(chunk)) for chunk in range(spec.num_chunks)]
        assert submission.num_bytes == sum(len(payload) for _, payload in submission.payloads())
        assert [row.prompt for row in submission.examples] == prompts[:3]
    assert not (tmp_path / "out").exists()


def test_what_the_spec_says(tmp_path: Path) -> None:
    source = tmp_path / "my prompts.v2.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"messages": [{"role": "user", "content": "a"}]}\n{"prompt": "b"}\n'))
    params = SamplingParams(max_tokens=3)
    read = ReadOptions(system="Be kind.")
    with prepare(source, model="m", params=params, read=read, priority="high", token_ids=True, seed=7) as submission:
        spec = submission.spec
    assert (spec.model, spec.num_rows, spec.chunk_rows, spec.params, spec.seed) == ("m", 2, 256, params, 7)
    assert (spec.system, spec.priority, spec.token_ids, spec.chat) == ("Be kind.", Priority.HIGH, True, True)
    assert spec.output == os.path.join(os.getcwd(), "outputs", spec.job_id)
    assert (spec.input.source, spec.input.num_bytes) == (str(source), source.stat().st_size)
    assert len(spec.input.sha256) == 64
    assert abs(spec.submitted_at - time.time()) < 60


def test_rows_of_a_program(tmp_path: Path) -> None:
    rows = ["a", {"prompt": "b", "max_tokens": 2}]
    with prepare(iter(rows), model="m", output=tmp_path) as first, prepare(rows, model="m", output=tmp_path) as second:
        assert (
            rows_of(first)
            == rows_of(second)
            == [
                Row(row_index=0, prompt="a"),
                Row(row_index=1, prompt="b", params=SamplingParams(max_tokens=2)),
            ]
        )
        assert first.spec.input.source == ""
        assert not first.spec.chat
        assert 0 <= first.spec.seed < MAX_SEED
        assert first.spec.seed != second.spec.seed
        assert first.spec.job_id != second.spec.job_id


def test_columns_that_the_job_or_any_row_asks_for(tmp_path: Path) -> None:
    def columns(rows: list[object], **params: int) -> frozenset[str]:
        with prepare(rows, model="m", output=tmp_path, params=SamplingParams(**params), chunk_rows=1) as submission:
            return submission.spec.optional_columns

    asking = {"prompt": "b", "logprobs": True}
    assert columns(["a", "b"]) == frozenset()
    assert columns(["a", asking, "c"]) == {"logprobs"}
    assert columns(["a"], logprobs=0, prompt_logprobs=0) == {"logprobs", "prompt_logprobs"}
    assert columns(["a", {"prompt": "b", "logprobs": False}], logprobs=False) == frozenset()


def test_rows_that_contradict_the_job_are_found(tmp_path: Path) -> None:
    job = SamplingParams(min_tokens=5, temperature=0.5)
    rows = [{"prompt": "a", "max_tokens": 4}, {"prompt": "b", "max_tokens": 5}, {"prompt": "c", "choices": ["yes"]}]
    with pytest.raises(InvalidInputError) as caught:
        prepare(rows, model="m", output=tmp_path, params=job)
    assert [(fault.line, fault.field, fault.problem) for fault in caught.value.faults] == [
        (1, "min_tokens", "must be at most max_tokens, which is 4, got 5 (with the job's options)")
    ]
    with pytest.raises(InvalidInputError, match=r"max_tokens +says nothing beside choices") as caught:
        prepare(rows, model="m", output=tmp_path, params=SamplingParams(choices=["yes", "no"]))
    assert [fault.line for fault in caught.value.faults] == [1, 2]


def test_all_faults_are_found_and_nothing_is_left(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"prompt": "a"}, "{", {"prompt": 1}, {"prompt": "b"}, {"max_tokens": 1}]
    )
    with pytest.raises(InvalidInputError) as caught:
        prepare(source, model="m", output=tmp_path / "out")
    assert [fault.line for fault in caught.value.faults] == [2, 3, 5]
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_transport_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="transport: must be one of auto, value, reference, got 'values'"):
        prepare(["a"], model="m", output=tmp_path, transport="values")  # type: ignore[arg-type]


def test_faults_can_be_recorded(tmp_path: Path) -> None:
    with prepare(["a", {}], model="m", output=tmp_path, read=ReadOptions(on_error="record")) as submission:
        good, bad = rows_of(submission)
        assert good.error is None
        assert bad.error is not None
        assert bad.error.type == "invalid_request"
        assert submission.faults.num_faults == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("data/prompts.jsonl.zst", "prompts"),
        ("-", "stdin"),
        (["a"], "rows"),
        (Path("Žluťoučký kůň.jsonl"), "lu-ou-k-k"),
        ("日本.jsonl", "rows"),
        (".hidden", "hidden"),
        ("x" * 300, "x" * 40),
    ],
)
def test_job_ids_tell_where_rows_are_from(source: Any, expected: str) -> None:
    job_id = new_job_id(source)
    assert is_job_id(job_id)
    assert job_id.startswith(f"{expected}-20")
    assert job_id != new_job_id(source)


@pytest.mark.parametrize("output", ["", "nope://bucket/out", "a\0b"])
def test_outputs_that_are_no_folders(output: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"^output: "):
        output_folder(output, "job")


def test_output_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert output_folder("a/../b", "job") == tmp_path / "b"
    assert output_folder("~/x", "job") == Path("/home/me/x")
    assert output_folder(None, "job") == tmp_path / "outputs" / "job"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"model": ""}, "model"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"chunk_rows": 257}, "chunk_rows"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"job_id": "a b"}, "job_id"),
        ({"job_id": ""}, "job_id"),
        ({"priority": "urgent"}, "priority"),
    ],
)
def test_arguments_that_are_refused(tmp_path: Path, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        prepare(["a"], **{"model": "m", "output": tmp_path, **arguments})
    assert caught.value.field == field


def test_inputs_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"write \[row\]"):
        prepare({"prompt": "a"}, model="m", output=tmp_path)
    with pytest.raises(UsageError, match="must be a path, a URL or a list of rows, got 5"):
        prepare(5, model="m", output=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="rows holds no rows"):
        prepare([], model="m", output=tmp_path)
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(OutputError, match="`overwrite`"):
        prepare(["a"], model="m", output=tmp_path)


def test_no_room_for_checked_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions.tempfile, "SpooledTemporaryFile", lambda _: open("/dev/full", "w+b"))  # noqa: SIM115
    with pytest.raises(OutputError, match="No space left on device; set TMPDIR"):
        prepare(["a"], model="m", output=tmp_path)


def test_a_submission_that_is_given_up_leaves_nothing(client: redis.Redis, tmp_path: Path) -> None:
    queue = JobQueue(client)
    with prepare(["a"], model="m", output=tmp_path) as submission:
        spec = submission.spec
        queue.create(spec)
        queue.append(spec, dict(submission.payloads()))
        queue.drop(spec)
        queue.drop(spec)
        with pytest.raises(JobNotFoundError):
            queue.status(spec.job_id)
        assert [key for key in client.scan_iter() if spec.job_id.encode() in key] == []
        assert queue.jobs() == []


def test_a_sealed_job_is_not_dropped(client: redis.Redis, tmp_path: Path) -> None:
    queue = JobQueue(client)
    with prepare(["a"], model="m", output=tmp_path) as submission:
        spec = submission.spec
        queue.create(spec)
        queue.append(spec, dict(submission.payloads()))
        queue.seal(spec)
        queue.drop(spec)
        assert queue.status(spec.job_id).state == "queued"
