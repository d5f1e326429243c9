"""Submitting the same rows to the same output goes on with what is there; anything else is refused by name."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_batch.errors import JobStateError, OutputError, UsageError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.dataset import SUCCESS, read_manifest
from minisgl_jobs.model import EngineInfo, JobState
from minisgl_jobs.owner import OWNER
from minisgl_jobs.parts import part_name, read_part
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.rows import ReadOptions
from minisgl_jobs.submission import prepare
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.jobs.own_server import OwnServer
from tests.workers.delivering import Group, group, part_bytes

MODEL = "resumed"
ROWS = 20
CHUNK = 4

Submit = Callable[..., JobHandle]


@pytest.fixture
def submit(redis_server: EmbeddedRedis, source: Path, tmp_path: Path) -> Submit:
    def submit_source(**options: Any) -> JobHandle:
        options = {"chunk_rows": CHUNK, "model": MODEL, **options}
        return Client(redis_server.url).submit(source, output=tmp_path / "out", **options)

    return submit_source


@pytest.fixture
def source(tmp_path: Path, rng: random.Random) -> Path:
    """Rows of which many are the same."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"prompt": "{rng.randrange(5)}"}}\n' for _ in range(ROWS)))
    return path


def do_chunks(worker: Group, num_chunks: int) -> None:
    for _ in range(num_chunks):
        work = worker.take()
        worker.run(work)
        worker.commit(work)


def finish(worker: Group, job: JobHandle) -> None:
    while not job.status().state.is_final:
        worker.tick()
        for work in list(worker.delivery.works):
            worker.run(work)
            worker.commit(work)
        worker.end_jobs()
    assert job.status().state is JobState.FINISHED
    assert job.results()["row_index"].to_pylist() == list(range(ROWS))


def cancel(worker: Group, job: JobHandle) -> None:
    job.cancel()
    wait_for(
        "the end of rows that run", lambda: worker.delivery.tick(worker.info, take=False) or not worker.delivery.works
    )
    worker.end_jobs()
    assert job.status().state is JobState.CANCELED


def test_a_canceled_job_goes_on(
    client: redis.Redis, submit: Submit, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Committed chunks stay as they are; of one that was under way, the rows that were finished."""
    with group(client, MODEL) as worker:
        first = submit()
        do_chunks(worker, 2)
        work = worker.take()
        part = work.next_part()
        assert part is not None
        work.start(part)
        worker.generate(work, part[0], 0)
        cancel(worker, first)
        before = part_bytes(tmp_path / "out")
        with prepare(source, model=MODEL, output=tmp_path / "out", chunk_rows=CHUNK) as submission:
            assert submission.resumption is not None
            assert submission.resumption.num_rows == 2 * CHUNK + 1
        again = submit(chunk_rows=CHUNK + 1)  # which changes no row: its parts stay as they are
        caplog.clear()
        assert (again.id, again.status().spec.chunk_rows) == (first.id, CHUNK)
        assert again.status().rows_done == 2 * CHUNK
        assert not (tmp_path / "out" / "_manifest.json").exists()
        finish(worker, again)
        assert not caplog.records  # chunks that were never begun are nothing to warn of
        assert Counter(worker.ran) == Counter({(row, 0): 1 for row in range(ROWS)})
        after = part_bytes(tmp_path / "out")
        assert [after[part_name(chunk)] for chunk in range(2)] == [before[part_name(chunk)] for chunk in range(2)]
        manifest = read_manifest(tmp_path / "out")
        assert manifest is not None
        assert (manifest.job_id, manifest.seed) == (first.id, first.status().spec.seed)


@pytest.mark.parametrize("of_row", [True, False])
def test_a_row_counts_once_all_of_its_samples_are_finished(
    api: Client, client: redis.Redis, tmp_path: Path, of_row: bool
) -> None:
    """Of one row both samples are finished, of the next one only the first; `n` is the row's own, or the job's."""
    rows: list[Any] = [{"prompt": prompt, "n": 2} if of_row else prompt for prompt in "abc"]
    params = SamplingParams() if of_row else SamplingParams(n=2)
    with group(client, MODEL) as worker:
        job = api.submit(rows, model=MODEL, output=tmp_path, params=params)
        work = worker.take()
        part = work.next_part()
        assert part is not None
        work.start(part)
        for row, sample in ((0, 0), (0, 1), (1, 0)):
            worker.generate(work, part[row], sample)
        wait_for("the spool", lambda: worker.delivery.tick(worker.info, take=False) or not work.unspooled)
        progress = job.progress()
        assert (progress.rows_done, progress.status.num_spooled) == (1, 3)
        cancel(worker, job)
        assert job.status().rows_ok == 1
        with prepare(rows, model=MODEL, output=tmp_path, params=params) as submission:
            assert submission.resumption is not None
            assert submission.resumption.num_rows == 1
        again = api.submit(rows, model=MODEL, output=tmp_path, params=params)
        worker.take()
        wait_for("the row on disk", lambda: worker.delivery.tick(worker.info, take=False) or again.progress().rows_done)
        progress = again.progress()
        assert (progress.rows_done, progress.status.num_spooled) == (1, 0)
        cancel(worker, again)  # nothing new: what was there counts as before
        assert again.status().rows_ok == 1


def test_each_part_says_which_engines_have_generated_it(
    client: redis.Redis, submit: Submit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole parts of one, a part that a second one finishes, and parts of the second."""
    first: EngineInfo = {"dtype": "float32", "default_sampling": {"temperature": 0.5}, "page_size": 16}
    second: EngineInfo = {"dtype": "bfloat16", "default_sampling": {"temperature": 0.5}, "page_size": 16}
    with group(client, MODEL, engine=first) as worker:
        job = submit()
        do_chunks(worker, 2)
        worker.run_some(worker.take(), 1)
        cancel(worker, job)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.engines == [first]
    client.flushall()
    caplog.clear()
    with group(client, MODEL, engine=second) as worker:
        worker.queue.heartbeat(worker.info)
        finish(worker, submit())
    (warning,) = caplog.messages
    assert warning.endswith("out are another engine's, and stay: dtype was float32 and is bfloat16")
    engines = [read_part(tmp_path / "out" / part_name(chunk)).info.engines for chunk in range(ROWS // CHUNK)]
    assert engines == [[first], [first], [first, second], [second], [second]]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.engines == [first, second]


def test_a_chunk_that_another_engine_takes_over_names_both(client: redis.Redis, submit: Submit, tmp_path: Path) -> None:
    with group(client, MODEL, engine={"tp": 1}) as first, group(client, MODEL, engine={"tp": 2}) as second:
        job = submit(limit=CHUNK)
        work = first.take()
        first.run_some(work, 1)
        first.queue.handback([work.lease])
        while not job.status().state.is_final:
            second.tick()
            for taken in list(second.delivery.works):
                second.run(taken)
            second.end_jobs()
    assert [row for row, _ in second.ran] == [1, 2, 3]
    assert read_part(tmp_path / "out" / part_name(0)).info.engines == [{"tp": 1}, {"tp": 2}]


@pytest.mark.parametrize("transport", ["value", "reference"])
def test_a_job_goes_on_after_redis_has_lost_everything(
    client: redis.Redis, submit: Submit, tmp_path: Path, transport: str
) -> None:
    with group(client, MODEL) as worker:
        first = submit(transport=transport)
        do_chunks(worker, 3)
        before = part_bytes(tmp_path / "out")
    client.flushall()
    with group(client, MODEL) as worker:
        again = submit(transport=transport)
        assert again.id == first.id
        finish(worker, again)
        assert len(worker.ran) == ROWS - 3 * CHUNK
        assert part_bytes(tmp_path / "out").items() >= before.items()


def test_a_power_loss_of_redis_and_a_second_submit(source: Path, tmp_path: Path) -> None:
    """The seal and the last commits are gone from Redis; the parts are not."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with OwnServer(folder) as server:
        client = redis.Redis.from_url(server.url)
        submitting = Client(server.url)
        options: dict[str, Any] = {"model": MODEL, "output": tmp_path / "out", "chunk_rows": CHUNK}
        with group(client, MODEL) as worker:
            first = submitting.submit(source, **options)
            do_chunks(worker, 3)
        server.lose_power(1 << 20)
        server.start()
        with group(client, MODEL) as worker:
            again = submitting.submit(source, **options)
            assert again.id == first.id
            finish(worker, again)
            assert len(worker.ran) == ROWS - 3 * CHUNK


def test_a_job_that_runs_is_found_again(client: redis.Redis, submit: Submit) -> None:
    with group(client, MODEL) as worker:
        first = submit()
        do_chunks(worker, 1)
        assert submit().id == first.id
        finish(worker, first)
        assert len(worker.ran) == ROWS


def test_a_finished_job_has_nothing_left_to_do(client: redis.Redis, submit: Submit, tmp_path: Path) -> None:
    with group(client, MODEL) as worker:
        first = submit()
        finish(worker, first)
        before = part_bytes(tmp_path / "out")
        assert submit().status().state is JobState.FINISHED
        client.flushall()  # as after its keys have expired
        again = submit()
        assert (tmp_path / "out" / SUCCESS).exists()
        finish(worker, again)
        assert len(worker.ran) == ROWS
        assert part_bytes(tmp_path / "out") == before
        assert not (tmp_path / "out" / OWNER).exists()


def test_parts_that_are_lost_or_damaged_are_made_again(client: redis.Redis, submit: Submit, tmp_path: Path) -> None:
    with group(client, MODEL) as worker:
        finish(worker, submit())
        (tmp_path / "out" / part_name(1)).unlink()
        (tmp_path / "out" / part_name(3)).write_bytes(b"PAR1 no more")
        finish(worker, submit())
        assert Counter(worker.ran)[CHUNK, 0] == Counter(worker.ran)[3 * CHUNK, 0] == 2
        assert len(worker.ran) == ROWS + 2 * CHUNK


def test_a_copy_of_a_part_is_none(client: redis.Redis, submit: Submit, tmp_path: Path) -> None:
    """Neither in place of another one, nor behind the last."""
    with group(client, MODEL) as worker:
        finish(worker, submit())
        for name in (part_name(1), part_name(ROWS // CHUNK)):
            shutil.copy(tmp_path / "out" / part_name(0), tmp_path / "out" / name)
        finish(worker, submit())
        assert Counter(worker.ran) == Counter({(row, 0): 1 + (row // CHUNK == 1) for row in range(ROWS)})


@pytest.mark.parametrize("num_new", [0, 1])
def test_a_damaged_part_keeps_no_canceled_job_from_ending(
    client: redis.Redis, submit: Submit, tmp_path: Path, rng: random.Random, num_new: int
) -> None:
    with group(client, MODEL) as worker:
        finish(worker, submit())
        damaged = tmp_path / "out" / part_name(0)
        content = damaged.read_bytes()
        damaged.write_bytes(rng.choice((b"", content[: len(content) // 2], content.replace(b'"job_id"', b'"job_1d"'))))
        job = submit()
        worker.run_some(worker.take(), num_new)
        cancel(worker, job)
        manifest = read_manifest(tmp_path / "out")
        assert manifest is not None
        assert (manifest.num_ok, manifest.num_errors) == (ROWS - CHUNK + num_new, 0)
        assert job.results()["row_index"].to_pylist() == [*range(num_new), *range(CHUNK, ROWS)]
        finish(worker, submit())


def test_failed_rows_run_again_when_asked_for(
    client: redis.Redis, submit: Submit, source: Path, tmp_path: Path
) -> None:
    """Also when no Redis knows the job any more, so that it can't be retried."""
    first, failing = submit(), {1, 2, 9}
    with group(client, MODEL) as worker:
        for _ in range(ROWS // CHUNK):
            work = worker.take()
            worker.run(work, lambda row: row.row_index in failing)
            worker.commit(work)
        worker.end_jobs()
    assert first.status().state is JobState.PARTIAL
    old = part_bytes(tmp_path / "out")
    client.flushdb()
    with prepare(source, model=MODEL, output=tmp_path / "out", chunk_rows=CHUNK) as kept:
        assert kept.resumption is not None
        assert (kept.resumption.is_complete, kept.resumption.num_failed) == (True, len(failing))
        assert kept.resumption.num_rows == ROWS
    options: dict[str, Any] = {"output": tmp_path / "out", "chunk_rows": CHUNK, "retry_failed": True}
    with prepare(source, model=MODEL, **options) as retried:
        assert retried.resumption is not None
        assert retried.resumption.num_rows == ROWS - len(failing)
    job = submit(retry_failed=True)
    assert job.id == first.id
    with group(client, MODEL) as worker:
        finish(worker, job)
        assert worker.ran == [(row, 0) for row in sorted(failing)]
    new = part_bytes(tmp_path / "out")
    assert {name for name in new if new[name] != old[name]} == {part_name(0), part_name(2)}
    with pytest.raises(UsageError, match="`overwrite`, which leaves nothing to retry"):
        submit(retry_failed=True, overwrite=True)


def test_failed_rows_of_a_job_that_is_under_way_do_not_run_again(client: redis.Redis, submit: Submit) -> None:
    with group(client, MODEL) as worker:
        job = submit()
        do_chunks(worker, 1)
        assert submit(retry_failed=True).id == job.id  # none has failed so far
        work = worker.take()
        worker.run(work, fails=lambda row: row.row_index == CHUNK)
        worker.commit(work)
        with pytest.raises(JobStateError, match=r"is running: its failed rows can run again when it has ended"):
            submit(retry_failed=True)
        assert job.status().rows_done == 2 * CHUNK
        worker.run_all()
        submit(retry_failed=True)
        again = submit(retry_failed=True)  # they are queued already
        assert again.status().rows_error == 0
        finish(worker, again)
        assert Counter(worker.ran) == Counter({(row, 0): 1 for row in range(ROWS)}) + Counter([(CHUNK, 0)])


def test_engines_whose_rows_all_run_again_are_none_of_those_that_are_there(
    client: redis.Redis, submit: Submit, source: Path, tmp_path: Path
) -> None:
    with group(client, MODEL, engine={"tp": 1}) as worker:
        submit(limit=CHUNK)
        work = worker.take()
        worker.run(work, fails=lambda _: True)
        worker.commit(work)
        worker.end_jobs()
    options: dict[str, Any] = {"model": MODEL, "output": tmp_path / "out", "read": ReadOptions(limit=CHUNK)}
    for retry_failed, engines in ((False, [{"tp": 1}]), (True, [])):
        with prepare(source, retry_failed=retry_failed, **options) as again:
            assert again.resumption is not None
            assert again.resumption.engines == engines


def test_failed_rows_of_no_dataset(source: Path) -> None:
    with pytest.raises(UsageError, match="retry_failed: needs the dataset whose rows have failed: give its `output`"):
        prepare(source, model=MODEL, retry_failed=True)


def test_failed_rows_stay_for_a_retry(client: redis.Redis, submit: Submit) -> None:
    with group(client, MODEL) as worker:
        submit()
        work = worker.take()
        worker.run(work, fails=lambda row: row.row_index == 1)
        worker.commit(work)
    client.flushall()
    with group(client, MODEL) as worker:
        again = submit()
        assert (again.status().rows_ok, again.status().rows_error) == (CHUNK - 1, 1)
        while not again.status().state.is_final:
            worker.tick()
            for work in list(worker.delivery.works):
                worker.run(work)
                worker.commit(work)
            worker.end_jobs()
        assert again.status().state is JobState.PARTIAL
        again.retry()
        finish(worker, again)
        assert worker.ran[-1] == (1, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 7}, "max_tokens is 7 and was not given"),
        ({"temperature": 0.5, "seed": 1}, "temperature is 0.5 and was not given"),
        ({"model": "other"}, 'model is "other" and was "resumed"'),
        ({"system": "Be kind."}, 'system is "Be kind." and was not given'),
        ({"token_ids": True}, "token_ids is true and was false"),
        ({"keep_columns": ["prompt"]}, "keep_columns is"),
        ({"limit": 3}, "number of rows is 3 and was 20"),
        ({"seed": -1}, "seed: must be between"),
        ({"job_id": "another"}, "job_id is another and was in-"),
    ],
)
@pytest.mark.parametrize("is_over", [False, True])
def test_another_job_is_refused_by_what_differs(
    client: redis.Redis, submit: Submit, options: dict[str, Any], words: str, is_over: bool
) -> None:
    with group(client, MODEL) as worker:
        job = submit()
        if is_over:
            finish(worker, job)
        with pytest.raises(Exception, match=words) as caught:
            submit(**options)
        if "seed" not in words:
            assert isinstance(caught.value, OutputError)
            assert "choose another folder, or overwrite it with `overwrite`" in str(caught.value)
        if not is_over:
            finish(worker, job)


def test_more_rows_of_the_same_input_are_refused(client: redis.Redis, submit: Submit, source: Path) -> None:
    with group(client, MODEL) as worker:
        finish(worker, submit())
    source.write_text(f'{source.read_text()}{{"prompt": "new"}}\n')
    with pytest.raises(OutputError, match="is 21 and was 20; a dataset can't be extended, as by a larger `limit`; "):
        submit()


def test_other_rows_are_refused_by_place(client: redis.Redis, submit: Submit, source: Path, tmp_path: Path) -> None:
    with group(client, MODEL) as worker:
        job = submit()
        finish(worker, job)
        lines = source.read_text().splitlines()
        lines[9] = '{"prompt": "new"}'
        source.write_text("\n".join(lines))
        with pytest.raises(OutputError, match="its rows differ, first among row_index 8 to 11"):
            submit()
        lines[9], lines[10] = lines[10], lines[9]
        source.write_text("\n".join(lines))
        with pytest.raises(OutputError, match="its rows differ"):
            submit()
        shutil.copytree(tmp_path / "out", tmp_path / "other")  # a copy is the same job's
        options: dict[str, Any] = {"model": MODEL, "output": tmp_path / "other", "chunk_rows": CHUNK}
        with pytest.raises(OutputError, match=f"the output of job {job.id}"):
            prepare(["a"], read=ReadOptions(), **options)
        again = submit(overwrite=True)
        assert again.id != job.id
        finish(worker, again)


def test_a_submission_that_was_killed_half_way_is_taken_up(
    client: redis.Redis, submit: Submit, source: Path, tmp_path: Path
) -> None:
    """Before the seal of a resumed job; what it had put into Redis ends by itself otherwise."""
    with group(client, MODEL) as worker:
        first = submit()
        do_chunks(worker, 2)
    client.flushall()
    queue = JobQueue(client)
    with prepare(source, model=MODEL, output=tmp_path / "out", chunk_rows=CHUNK) as submission:
        assert submission.resumption is not None
        queue.create(submission.spec, epoch=submission.resumption.epoch)
        queue.adopt(submission.spec, submission.resumption.done)
        queue.append(submission.spec, dict(list(submission.payloads())[:1]))
    keys = [key for key in client.scan_iter() if b":job:" in key]
    assert len(keys) == 3  # its record, payloads and done chunks
    assert all(client.ttl(key) > 0 for key in keys)
    with group(client, MODEL) as worker:
        again = submit()
        assert again.id == first.id
        finish(worker, again)
        assert len(worker.ran) == ROWS - 2 * CHUNK
