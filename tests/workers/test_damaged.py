"""What anybody may have put into Redis under one job ends that job alone: the group goes on with the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from minisgl_jobs.chunks import encode_chunk
from minisgl_jobs.dataset import read_dataset
from minisgl_jobs.keys import QueueKeys, queue_name
from minisgl_jobs.model import JobSpec, JobState, Row, RowResult
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.spool import encode_batch, encode_result, sample_name
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import MODEL, make_spec, wait_for, worker
from tests.workers.delivering import Group, group
from tests.workers.echo_group import MODEL as ECHO
from tests.workers.echo_group import start_echo_group

Plant = Callable[[redis.Redis, Callable[[str], str]], object]


def field(name: str, value: str | bytes) -> Plant:
    return lambda client, key: client.hset(key(""), name, value)


def poison(text: str) -> Plant:
    return lambda client, key: client.hset(key("poison"), "0", text)


def other_type(part: str) -> Plant:
    def plant(client: redis.Redis, key: Callable[[str], str]) -> None:
        client.delete(key(part))
        if part == "done":
            client.hset(key(part), "x", "y")
        else:
            client.set(key(part), "x")

    return plant


DAMAGE: dict[str, Plant] = {
    "a spec that is none": field("spec", b"\xff\xfe"),
    "a spec of another type": field("spec", b"\x01"),
    "num_chunks": field("num_chunks", "abc"),
    "next": field("next", "zz"),
    "next beyond all numbers": field("next", "1e300"),
    "num_chunks beyond all numbers": field("num_chunks", "1e300"),
    "epoch": field("epoch", "x"),
    "a negative epoch": field("epoch", "-1"),
    "a chunk beyond the last": lambda client, key: client.rpush(key("todo"), "7"),
    "more chunks than rows": field("num_chunks", "9"),
    "poison that isn't JSON": poison("not json"),
    "poison of a wrong shape": poison('{"deaths": "x", "rows": {"a": "b"}}'),
    "a list as poison": poison("[1, 2]"),
    "a spool without its batch": lambda client, key: client.hset(key("spool:0"), "0.0", "7"),
    "a damaged batch": lambda client, key: client.hset(key("spool:0"), mapping={"0.0": "1", "b1": b"junk", "n": 1}),
    "a spool of no rows": lambda client, key: client.hset(key("spool:0"), mapping={"zz": "1", "n": 1}),
    "todo": lambda client, key: client.rpush(key("todo"), "abc"),
    "a negative todo": lambda client, key: client.rpush(key("todo"), "-1"),
    "the type of todo": other_type("todo"),
    "the type of live": other_type("live"),
    "the type of done": other_type("done"),
    "the type of in": other_type("in"),
    "the type of poison": other_type("poison"),
}


def put(client: redis.Redis, spec: JobSpec) -> JobSpec:
    """A job of one row a chunk in the queue."""
    queue = JobQueue(client)
    queue.create(spec)
    queue.append(spec, {chunk: encode_chunk([Row(chunk, prompt="x")]) for chunk in range(spec.num_chunks)})
    queue.seal(spec)
    return spec


def damage(client: redis.Redis, spec: JobSpec, plant: Plant) -> None:
    keys = QueueKeys(queue_name(spec.model))
    plant(client, lambda part: keys.job(spec.job_id, part))


def spec_in(folder: Path, name: str, model: str = MODEL) -> JobSpec:
    return make_spec(2, 1, job_id=name, output=str(folder / name), model=model)


def serve(running: Group, client: redis.Redis, job_id: str) -> None:
    """Until a job has ended."""

    def has_ended() -> bool:
        running.tick()
        for work in list(running.delivery.works):
            running.run(work)
        running.end_jobs()
        return JobQueue(client).status(job_id).state.is_final

    wait_for("the end of the sound job", has_ended, 30)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_job_fails_and_the_others_go_on(
    client: redis.Redis, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = put(client, spec_in(tmp_path, "bad")), spec_in(tmp_path, "good")
    damage(client, bad, DAMAGE[kind])
    put(client, good)
    with caplog.at_level(logging.ERROR), group(client, MODEL) as running:
        serve(running, client, good.job_id)
        assert running.queue.audit() == 0
    assert JobQueue(client).status(good.job_id).state is JobState.FINISHED
    assert read_dataset(tmp_path / "good").num_rows == 2
    keys = QueueKeys(queue_name(MODEL))
    assert client.hget(keys.job("bad"), "state") == b"failed"
    assert client.hget(keys.job("bad"), "error")
    told = [record.getMessage() for record in caplog.records if "job bad is failed" in record.getMessage()]
    assert len(told) == 1
    JobQueue(client).purge("bad")
    assert not client.exists(keys.job("bad"))


def test_a_record_of_another_type_leaves_the_queue(client: redis.Redis, tmp_path: Path) -> None:
    """There is nowhere to write why, but in the log."""
    bad, good = put(client, spec_in(tmp_path, "bad")), put(client, spec_in(tmp_path, "good"))
    damage(client, bad, other_type(""))
    with group(client, MODEL) as running:
        serve(running, client, good.job_id)
    keys = QueueKeys(queue_name(MODEL))
    assert client.zscore(keys.part("jobs"), "bad") is None
    JobQueue(client).purge("bad")
    assert not client.exists(keys.job("bad"))


@pytest.mark.parametrize("count", ["1e300", "inf", "nan", "-1", "0.5", ""])
def test_an_audit_ends_whatever_the_counts_say(client: redis.Redis, tmp_path: Path, count: str) -> None:
    """Redis does nothing else meanwhile."""
    damage(client, put(client, spec_in(tmp_path, "bad")), field("next", count))
    assert worker(client).audit() == 0
    assert JobQueue(client).status("bad").state is JobState.FAILED


@pytest.mark.parametrize("part", ["", "live", "poison"])
def test_records_that_are_damaged_while_a_chunk_runs_end_their_job(
    client: redis.Redis, tmp_path: Path, part: str
) -> None:
    bad = put(client, spec_in(tmp_path, "bad"))
    with group(client, MODEL) as running:
        work = running.take()
        damage(client, bad, other_type(part))
        running.keeper.renew()
        good = put(client, spec_in(tmp_path, "good"))
        running.run(work)
        serve(running, client, good.job_id)
        assert work not in running.delivery.works
    JobQueue(client).purge("bad")


def spooled(result: RowResult) -> Plant:
    name = sample_name(result.row_index, result.sample_index)
    batch = encode_batch({(result.row_index, result.sample_index): encode_result(result)})
    return lambda client, key: client.hset(key("spool:0"), mapping={name: "1", "b1": batch, "n": 1, "rows": 1})


@pytest.mark.parametrize(
    "result", [RowResult(0, completion_tokens=1 << 62), RowResult(77), RowResult(0, sample_index=5)], ids=str
)
def test_spooled_results_that_fit_no_part_end_their_job(client: redis.Redis, tmp_path: Path, result: RowResult) -> None:
    bad = put(client, spec_in(tmp_path, "bad"))
    damage(client, bad, spooled(result))
    with group(client, MODEL) as running:
        serve(running, client, "bad")
        serve(running, client, put(client, spec_in(tmp_path, "good")).job_id)
    assert JobQueue(client).status("bad").state is JobState.FAILED


@pytest.mark.parametrize(
    "plant", [field("start_ms", "soon"), field("after", b"\xff"), field("after", "bad"), other_type("")]
)
def test_a_damaged_job_that_is_held_ends(client: redis.Redis, tmp_path: Path, plant: Plant) -> None:
    queue, bad = JobQueue(client), spec_in(tmp_path, "bad")
    queue.create(bad)
    queue.append(bad, {chunk: encode_chunk([Row(chunk, prompt="x")]) for chunk in range(bad.num_chunks)})
    queue.seal(bad, start_at=4e9)
    keys = QueueKeys(queue_name(MODEL))
    damage(client, bad, plant)
    client.zadd(keys.part("held"), {"bad": 0})
    with group(client, MODEL) as running:
        serve(running, client, put(client, spec_in(tmp_path, "good")).job_id)
    queue.fail("bad", "as the client does")
    queue.purge("bad")
    assert client.zcard(keys.part("held")) == 0


@pytest.mark.parametrize("rows", [[], [77], [0, 1]])
def test_a_payload_with_other_rows_makes_error_rows(client: redis.Redis, tmp_path: Path, rows: list[int]) -> None:
    spec = put(client, spec_in(tmp_path, "bad"))
    payload = encode_chunk([Row(row, prompt="x") for row in rows])
    damage(client, spec, lambda client, key: client.hset(key("in"), "0", payload))
    with group(client, MODEL) as running:
        serve(running, client, "bad")
    status = JobQueue(client).status("bad")
    assert (status.state, status.rows_ok, status.rows_error) == (JobState.PARTIAL, 1, 1)
    assert read_dataset(tmp_path / "bad")["error_type"].to_pylist() == ["damaged_payload", None]


@pytest.mark.parametrize("plant", [field("spec", b"junk"), field("state", "odd"), other_type("live"), other_type("")])
def test_cancel_and_purge_end_a_damaged_job_without_a_worker(client: redis.Redis, tmp_path: Path, plant: Plant) -> None:
    damage(client, put(client, spec_in(tmp_path, "bad")), plant)
    queue = JobQueue(client)
    queue.cancel("bad")
    assert all(job.state is JobState.FAILED for job in queue.jobs())  # some can't be listed
    queue.fail("bad", "as the client does")
    queue.purge("bad")


def test_a_group_survives_all_of_it_in_one_process(
    redis_server: EmbeddedRedis, client: redis.Redis, tmp_path: Path
) -> None:
    with start_echo_group(redis_server.url) as command:
        command.wait_for("serving", 60)
        for number, plant in enumerate(DAMAGE.values()):
            damage(client, put(client, spec_in(tmp_path, f"bad-{number}", ECHO)), plant)
        good = put(client, spec_in(tmp_path, "good", ECHO))
        queue = JobQueue(client)
        wait_for("the sound job", lambda: queue.status(good.job_id).state is JobState.FINISHED, 90)
        assert "starting the group" not in command.stderr
